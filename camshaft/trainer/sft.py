"""Trainer for supervised fine-tuning, based on the role in `roles/sft.py`.

with SFTTrainer(config) as trainer:
    trainer.prepare()
    trainer.fit(tracking)
"""

from __future__ import annotations

from pathlib import Path

from camshaft.config import SFTConfig
from camshaft.data import SFTOptions, load_sft
from camshaft.dataproto import DataProto
from camshaft.roles import SFTWorker
from camshaft.trainer.supervised import SupervisedTrainer


class SFTTrainer(SupervisedTrainer[SFTWorker]):
    """Trainer with the cross-entropy loss of the trained tokens."""

    tokens = ("input_ids",)

    def __init__(self, config: SFTConfig):
        self.data = config.data
        super().__init__(config, SFTWorker)

    def rows(self, files: list[Path], max_rows: int | None) -> DataProto:
        options = SFTOptions(
            max_length=self.data.max_length,
            truncation=self.data.truncation,
            prompt_key=self.data.prompt_key,
            response_key=self.data.response_key,
        )
        return load_sft(files, self.tokenizer, options, max_rows).batch

    def validate(self, rows: DataProto) -> dict[str, float]:
        """Compute the mean cross-entropy per trained token on held-out rows."""
        predictions = self.infer(rows, self.model.compute_log_prob)
        mask = rows["loss_mask"].values
        total = -float(predictions["log_probs"].values[mask].double().sum())
        return {"val/loss": total / int(mask.sum())}
