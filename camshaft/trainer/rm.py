"""Trainer of reward models, based on the role in `roles/rm.py`.

with RMTrainer(config) as trainer:
    trainer.prepare()
    trainer.fit(tracking)
"""

from __future__ import annotations

from pathlib import Path

from camshaft.algorithms import preference_loss
from camshaft.config import RMConfig
from camshaft.data import PreferenceOptions, load_preferences
from camshaft.dataproto import DataProto
from camshaft.models.loader import import_external, load_config, model_folder
from camshaft.roles import RMWorker
from camshaft.trainer.supervised import SupervisedTrainer


class RMTrainer(SupervisedTrainer[RMWorker]):
    """Trainer with the Bradley-Terry loss on preference pairs."""

    tokens = ("chosen", "rejected")

    def __init__(self, config: RMConfig):
        self.data, self.center = config.data, config.center_rewards_coefficient
        model = config.model
        import_external(model.external_lib)
        settings = load_config(model_folder(model.source()), model.trust_remote_code, model.override_config)
        self.pad = settings.get_text_config().pad_token_id
        super().__init__(config, RMWorker)

    def rows(self, files: list[Path], max_rows: int | None) -> DataProto:
        options = PreferenceOptions(
            max_length=self.data.max_length,
            truncation=self.data.truncation,
            prompt_key=self.data.prompt_key,
            chosen_key=self.data.chosen_key,
            rejected_key=self.data.rejected_key,
            margin_key=self.data.margin_key,
            pad=self.pad,
        )
        return load_preferences(files, self.tokenizer, options, max_rows).batch

    def validate(self, rows: DataProto) -> dict[str, float]:
        """Compute the loss and the metrics of `preference_loss` on held-out pairs."""
        scores = self.infer(rows, self.model.compute_scores)
        loss, metrics = preference_loss(
            scores["chosen_scores"].double(),
            scores["rejected_scores"].double(),
            rows["margin"],
            len(rows),
            center=self.center,
        )
        return {f"val/{name}": float(value) for name, value in {"loss": loss, **metrics}.items()}
