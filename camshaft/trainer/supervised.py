"""Trainers for supervised fine-tuning and reward models, based on the roles in `roles/sft.py` and `roles/rm.py`.

    status = run(config, SFTTrainer)        # of `loop.py`, which trains, validates and saves

Each batch is one optimizer step. The loss is averaged over the whole batch and does not depend on the number of
micro-batches or ranks. At the end, the model is exported in Hugging Face format. A single rank runs in this process.
Several ranks run in worker processes, which end when the `with` block exits.
"""

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from camshaft.algorithms import preference_loss
from camshaft.checkpoint import check_export_path
from camshaft.config import GLOBAL_POOL, RMConfig, SFTConfig, SupervisedConfig, Topology
from camshaft.config.auto.fitting import fit_to_rows
from camshaft.config.run_folder import number_run
from camshaft.controller import spawn
from camshaft.controller.placement import pool_specs, run_pools
from camshaft.data import PreferenceOptions, SFTOptions, StatefulLoader, data_files, load_preferences, load_sft
from camshaft.dataproto import DataProto
from camshaft.fetch import fetch_models
from camshaft.models.loader import import_external, load_config, model_folder
from camshaft.roles import RMWorker, SFTWorker, SupervisedWorker
from camshaft.tracking import Tracking
from camshaft.tracking.record import RunStatus
from camshaft.trainer.loop import TrainingLoop
from camshaft.trainer.metrics import StepMetrics
from camshaft.trainer.mini_batches import balance_ranks
from camshaft.trainer.resume import input_checksums
from camshaft.trainer.session import Extensions, run_length, run_tokenizer

C = TypeVar("C", bound=SupervisedConfig)
W = TypeVar("W", bound=SupervisedWorker)


class SupervisedTrainer(TrainingLoop[C, DataProto, DataProto], Generic[C, W]):
    """Training run of a single model with one optimizer step per batch."""

    metric_prefix = "train"
    tokens: ClassVar[tuple[str, ...]]
    """Columns with the token ids that the model reads."""

    def __init__(self, config: C, worker: type[W], extensions: Extensions | None, chat_template: str | None = None):
        check_export_path(config.export_path())
        fetch_models(config.model_sources())
        self.tokenizer: Any = run_tokenizer(
            config.model.source(), config.model.trust_remote_code, chat_template, config.trainer.default_local_dir
        )
        self.own_tokenizer = None if chat_template is None else str(self.tokenizer.name_or_path)
        """Folder of the tokenizer with the chat template of the run. None: the tokenizer is that of the model."""
        self.dp_size = Topology(config.trainer.world_size).dp_size(config.ranks_per_row())
        logs, max_rows = Path(config.trainer.default_local_dir) / "logs", config.data.train_max_samples
        with contextlib.ExitStack() as stack:
            status = stack.enter_context(RunStatus(config.trainer.default_local_dir))
            rows = self.rows(data_files(config.data.train_files), "training data", None if max_rows == -1 else max_rows)
            fitted = fit_to_rows(config, len(rows))
            loader = StatefulLoader(
                rows,
                fitted.data.train_batch_size,
                total_epochs=config.trainer.total_epochs,
                shuffle=config.data.shuffle,
                seed=config.data_seed(),
            )
            val_files = config.data.val_files
            self.val_rows = self.rows(data_files(val_files), "validation data") if val_files else None
            total_steps, checksums = run_length(config.trainer, loader), input_checksums(config)
            started = run_pools(config.trainer, pool_specs(config), config.ray_kwargs.ray_init, logs)
            pools = stack.enter_context(started)
            self.model = spawn(worker, fitted, total_steps, pool=pools[GLOBAL_POOL], name="model")
            super().__init__(fitted, loader, total_steps, {"model": self.model}, status, checksums)
            self._exit = stack.pop_all()
        self.on_step = () if extensions is None else extensions.on_step

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._exit:
            super().__exit__(kind)

    @abstractmethod
    def rows(self, files: list[Path], label: str, max_rows: int | None = None) -> DataProto:
        """Load at most `max_rows` rows of the files; None loads all rows. `label` names the data in the log."""

    @abstractmethod
    def evaluate(self, rows: DataProto) -> dict[str, float]:
        """Compute metrics of held-out rows."""

    def init_models(self) -> None:
        self.model.init_model()

    def collect(self, inputs: DataProto, metrics: StepMetrics) -> DataProto:
        return inputs

    def step(self, batch: DataProto, metrics: StepMetrics) -> dict[str, float]:
        self.batch, start = batch, time.perf_counter()
        tokens = torch.stack([batch.ragged(name).lengths for name in self.tokens]).sum(0)
        rows = balance_ranks(batch, tokens, self.dp_size)
        with metrics.phase("train"):
            metrics.add(self.model.train_batch(rows).meta_info["metrics"])
        seconds = time.perf_counter() - start
        metrics.add({"timing_s/step": seconds, "perf/throughput": int(tokens.sum()) / seconds})
        return metrics.values

    def validate(self, tracking: Tracking) -> dict[str, float]:
        assert self.val_rows is not None, "validated by the config"
        start = time.perf_counter()
        metrics = self.evaluate(self.val_rows)
        return metrics | {"timing_s/validate": time.perf_counter() - start}

    def infer(self, rows: DataProto, method: Callable[[DataProto], DataProto]) -> DataProto:
        """Apply a method of the model to `rows` in batches, and concatenate the results."""
        results = []
        for batch in rows.split(self.config.data.train_batch_size):
            padded, num_padding_rows = batch.pad_to_divisor(self.dp_size)
            results.append(method(padded).unpad(num_padding_rows))
        return DataProto.concat(results)

    def keep(self) -> dict[str, int | None]:
        return {"model": self.config.trainer.max_ckpt_to_keep}

    def state(self) -> dict[str, Any]:
        return {"tokenizer": self.own_tokenizer}

    def exports(self) -> dict[str, Callable[[str, str | None], None]]:
        export = partial(self.model.export, tokenizer=self.own_tokenizer)
        return {"model": export} if self.config.checkpoint.saves_hf_model() else {}

    def finish(self) -> None:
        self.model.export(self.export_path(), tokenizer=self.own_tokenizer)

    def export_path(self) -> str:
        return self.config.export_path()


class SFTTrainer(SupervisedTrainer[SFTConfig, SFTWorker]):
    """Trainer with the cross-entropy loss of the trained tokens."""

    tokens = ("input_ids",)

    def __init__(self, config: SFTConfig, extensions: Extensions | None = None):
        self.data = config.data
        super().__init__(number_run(config), SFTWorker, extensions, self.data.chat_template)

    def rows(self, files: list[Path], label: str, max_rows: int | None = None) -> DataProto:
        options = SFTOptions(
            max_length=self.data.max_length,
            truncation=self.data.truncation,
            prompt_key=self.data.prompt_key,
            response_key=self.data.response_key,
            chat=self.data,
        )
        return load_sft(files, self.tokenizer, options, max_rows, label).batch

    def evaluate(self, rows: DataProto) -> dict[str, float]:
        """Compute the mean cross-entropy per trained token on held-out rows."""
        predictions = self.infer(rows, self.model.compute_log_prob)
        mask = rows["loss_mask"].values
        total = -float(predictions["log_probs"].values[mask].double().sum())
        return {"val/loss": total / int(mask.sum())}


class RMTrainer(SupervisedTrainer[RMConfig, RMWorker]):
    """Trainer with the Bradley-Terry loss on preference pairs."""

    tokens = ("chosen", "rejected")

    def __init__(self, config: RMConfig, extensions: Extensions | None = None):
        self.data, self.center = config.data, config.center_rewards_coefficient
        model = config.model
        import_external(model.external_lib)
        settings = load_config(model_folder(model.source()), model.trust_remote_code, model.override_config)
        self.pad = settings.get_text_config().pad_token_id
        super().__init__(number_run(config), RMWorker, extensions)

    def rows(self, files: list[Path], label: str, max_rows: int | None = None) -> DataProto:
        options = PreferenceOptions(
            max_length=self.data.max_length,
            truncation=self.data.truncation,
            prompt_key=self.data.prompt_key,
            chosen_key=self.data.chosen_key,
            rejected_key=self.data.rejected_key,
            margin_key=self.data.margin_key,
            pad=self.pad,
        )
        return load_preferences(files, self.tokenizer, options, max_rows, label).batch

    def evaluate(self, rows: DataProto) -> dict[str, float]:
        """Compute the loss and the metrics of `preference_loss` on held-out pairs."""
        scores = self.infer(rows, self.model.compute_scores)
        chosen, rejected = scores["chosen_scores"].double(), scores["rejected_scores"].double()
        loss, metrics = preference_loss(chosen, rejected, rows["margin"], len(rows), center=self.center)
        return {f"val/{name}": float(value) for name, value in {"loss": loss, **metrics}.items()}
