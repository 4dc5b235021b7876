"""Trainers for supervised fine-tuning and reward models, based on the roles in `roles/sft.py` and `roles/rm.py`.

    with SFTTrainer(config) as trainer:
        trainer.prepare()
        trainer.fit(tracking)

    status = train_all(configs, SFTTrainer)        # also sets up session and trackers

Each batch is one optimizer step. The loss is averaged over the whole batch and does not depend on the number of
micro-batches or ranks. At the end, the model is exported in Hugging Face format. A single rank runs in this process.
Several ranks run in worker processes, which end when the `with` block exits.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from camshaft.algorithms import preference_loss
from camshaft.checkpoint import BestStep, CheckpointManager, SavedCheckpoint, check_export_path
from camshaft.config import GLOBAL_POOL, RMConfig, SFTConfig, SupervisedConfig, Topology
from camshaft.controller import spawn
from camshaft.controller.placement import global_pool, run_pools
from camshaft.data import PreferenceOptions, SFTOptions, StatefulLoader, data_files, load_preferences, load_sft
from camshaft.dataproto import DataProto
from camshaft.garbage import frozen_objects
from camshaft.models.loader import import_external, load_config, load_tokenizer, model_folder
from camshaft.roles import RMWorker, SFTWorker, SupervisedWorker
from camshaft.stop import ENDED_BY_SIGNAL, Stop
from camshaft.tracking import Tracking
from camshaft.tracking.durable import RunFiles
from camshaft.tracking.record import RunStatus
from camshaft.trainer.divergence import DivergenceCheck
from camshaft.trainer.mini_batches import balance_ranks
from camshaft.trainer.resume import check_resume, config_record, input_checksums, log_resume
from camshaft.trainer.schedule import SAVE_INTERVAL, Schedule
from camshaft.trainer.session import (
    Extensions,
    StepHook,
    call_hooks,
    check_libraries,
    finish_saving,
    fit_batch,
    run_length,
    session,
)

W = TypeVar("W", bound=SupervisedWorker)


class SupervisedTrainer(ABC, Generic[W]):
    """Training run of a single model with one optimizer step per batch."""

    tokens: ClassVar[tuple[str, ...]]
    """Columns with the token ids that the model reads."""

    def __init__(self, config: SupervisedConfig, worker: type[W]):
        self.config = config
        check_export_path(config.export_path())
        self.tokenizer: Any = load_tokenizer(config.model.source(), config.model.trust_remote_code)
        ranks = config.trainer.world_size
        self.dp_size = Topology(ranks).dp_size(config.ranks_per_row())
        logs = Path(config.trainer.default_local_dir) / "logs"
        specs = [global_pool(config.trainer, "model")]
        with contextlib.ExitStack() as stack:
            self.status = stack.enter_context(RunStatus(config.trainer.default_local_dir))
            self._load_rows(config)
            self.total_steps = run_length(config.trainer, self.loader)
            self.input_checksums = input_checksums(config)
            pools = stack.enter_context(run_pools(config.trainer, specs, config.ray_kwargs.ray_init, logs))
            self.model = spawn(worker, self.config, self.total_steps, pool=pools[GLOBAL_POOL], name="model")
            self._exit = stack.pop_all()
        self.checkpoints = CheckpointManager(
            config.trainer.default_local_dir, config.trainer.default_hdfs_dir, config.trainer.worker_limit("save")
        )
        self.files = RunFiles(config.trainer.default_local_dir)
        self.best = BestStep(config.trainer.best_metric, config.trainer.best_metric_mode)
        self.divergence = DivergenceCheck({"model": self.model}, config.trainer.max_skipped_steps, prefix="train")
        self.global_step = 0
        self.on_step: Sequence[StepHook] = ()
        """Hooks that are called after each step, and may add metrics."""

    def _load_rows(self, config: SupervisedConfig) -> None:
        """Load the rows, and fit the batch size to them."""
        max_rows = config.data.train_max_samples
        rows = self.rows(data_files(config.data.train_files), "training data", None if max_rows == -1 else max_rows)
        self.config = fit_batch(config, len(rows))
        self.loader = StatefulLoader(
            rows,
            self.config.data.train_batch_size,
            total_epochs=config.trainer.total_epochs,
            shuffle=config.data.shuffle,
            seed=config.data_seed(),
        )
        val_files = config.data.val_files
        self.val_rows = self.rows(data_files(val_files), "validation data") if val_files else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._exit:
            self.finish_saving(failed=kind is not None)

    def finish_saving(self, failed: bool = False) -> None:
        finish_saving([self.model], self.checkpoints, failed)

    @abstractmethod
    def rows(self, files: list[Path], label: str, max_rows: int | None = None) -> DataProto:
        """Load at most `max_rows` rows of the files; None loads all rows. `label` names the data in the log."""

    @abstractmethod
    def validate(self, rows: DataProto) -> dict[str, float]:
        """Compute metrics on held-out rows."""

    def prepare(self) -> SavedCheckpoint | None:
        """Build the model. If the run resumes from a checkpoint, load and return it."""
        self.status.enter("load")
        saved = self.checkpoints.latest() if self.config.trainer.resume_mode == "auto" else None
        if saved is not None:
            check_resume(saved, self.config, ["model"], self.input_checksums)
        self.model.init_model()
        if saved is not None:
            self.model.load_checkpoint(saved.role("model"))
            self.loader.load_state_dict(saved.state["loader"])
            self.best.load_state_dict(saved.state["best"])
            self.global_step = saved.step
            log_resume(saved, self.total_steps)
        if self.config.trainer.resume_mode == "disable":
            self.checkpoints.move_aside(after=0)
        return saved

    def fit(self, tracking: Tracking, stop: Stop | None = None) -> dict[str, float]:
        """Train until the end or a stop signal, and return the metrics of the last step.

        At the end, export the model. After a stop signal, save a checkpoint instead.
        """
        trainer, stop, should_save = self.config.trainer, stop or Stop(), False
        saves, tests = Schedule(trainer.save_freq, SAVE_INTERVAL), Schedule(trainer.test_freq)
        metrics: dict[str, float] = {}
        for batch in self.loader:
            if self.global_step >= self.total_steps:
                break
            self.global_step += 1
            self.status.step = self.global_step
            self.status.enter("train")
            metrics = call_hooks(self.on_step, self.global_step, batch, self.step(batch))
            is_last = self.global_step == self.total_steps or self.loader.exhausted
            should_save = should_save or saves.is_due(self.global_step, is_last)
            if self.val_rows is not None and tests.is_due(self.global_step, is_last):
                self.status.enter("validate")
                with tests.measure():
                    val_metrics = self.validate(self.val_rows)
                should_save = self.best.update(val_metrics, self.global_step) or should_save
                metrics |= val_metrics
            tracking.log(metrics, step=self.global_step)
            is_good = self.divergence.check_updates(self.global_step, metrics)
            is_stopped = stop.requested is not None and not is_last
            if is_stopped or (should_save and (is_good or is_last)):
                with saves.measure():
                    self.save(prune=is_good)
                should_save = False
            elif should_save:
                self.divergence.check_outputs(self.global_step)
            if is_stopped:
                stop.acknowledge(self.global_step, self.total_steps)
                return metrics
        self.model.export(self.config.export_path())
        return metrics

    def step(self, batch: DataProto) -> dict[str, float]:
        start = time.perf_counter()
        tokens = torch.stack([batch.ragged(name).lengths for name in self.tokens]).sum(0)
        metrics = self.model.train_batch(balance_ranks(batch, tokens, self.dp_size)).meta_info["metrics"]
        seconds = time.perf_counter() - start
        return metrics | {"timing_s/step": seconds, "perf/throughput": int(tokens.sum()) / seconds}

    def infer(self, rows: DataProto, method: Callable[[DataProto], DataProto]) -> DataProto:
        """Apply a method of the model to `rows` in batches, and concatenate the results."""
        results = []
        for batch in rows.split(self.config.data.train_batch_size):
            padded, num_padding_rows = batch.pad_to_divisor(self.dp_size)
            results.append(method(padded).unpad(num_padding_rows))
        return DataProto.concat(results)

    def save(self, prune: bool = True) -> None:
        """Save the state of the run as an atomic checkpoint, unless the model has diverged; prune old checkpoints.

        The files of the steps up to this one are flushed to the disk before.
        """
        self.status.enter("save")
        self.divergence.check_outputs(self.global_step)
        roles = {"model": partial(self.model.save_checkpoint, global_step=self.global_step)}
        keep = {"model": self.config.trainer.max_ckpt_to_keep} if prune else {}
        exports = {"model": self.model.export} if self.config.checkpoint.saves_hf_model() else {}
        state = {
            "loader": self.loader.state_dict(),
            "best": self.best.state_dict(),
            "config": config_record(self.config),
            "inputs": self.input_checksums,
            "recorded": {"metrics": self.files.flush()},
        }
        self.checkpoints.save(self.global_step, roles, state, keep, exports, self.best.step)


class SFTTrainer(SupervisedTrainer[SFTWorker]):
    """Trainer with the cross-entropy loss of the trained tokens."""

    tokens = ("input_ids",)

    def __init__(self, config: SFTConfig):
        self.data = config.data
        super().__init__(config, SFTWorker)

    def rows(self, files: list[Path], label: str, max_rows: int | None = None) -> DataProto:
        options = SFTOptions(
            max_length=self.data.max_length,
            truncation=self.data.truncation,
            prompt_key=self.data.prompt_key,
            response_key=self.data.response_key,
        )
        return load_sft(files, self.tokenizer, options, max_rows, label).batch

    def validate(self, rows: DataProto) -> dict[str, float]:
        """Compute the mean cross-entropy per trained token on held-out rows."""
        predictions = self.infer(rows, self.model.compute_log_prob)
        mask = rows["loss_mask"].values
        total = -float(predictions["log_probs"].values[mask].double().sum())
        return {"val/loss": total / int(mask.sum())}


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

    def validate(self, rows: DataProto) -> dict[str, float]:
        """Compute the loss and the metrics of `preference_loss` on held-out pairs."""
        scores = self.infer(rows, self.model.compute_scores)
        chosen, rejected = scores["chosen_scores"].double(), scores["rejected_scores"].double()
        loss, metrics = preference_loss(chosen, rejected, rows["margin"], len(rows), center=self.center)
        return {f"val/{name}": float(value) for name, value in {"loss": loss, **metrics}.items()}


C = TypeVar("C", bound=SupervisedConfig)


def train_all(configs: Sequence[C], trainer_class: Callable[[C], SupervisedTrainer[Any]]) -> int:
    """Train with one config after the other and return the largest exit status. A stop signal ends the sweep."""
    status = 0
    for config in configs:
        status = max(status, run_supervised(config, trainer_class))
        if status > ENDED_BY_SIGNAL:
            break
    return status


def run_supervised(
    config: C, trainer_class: Callable[[C], SupervisedTrainer[Any]], extensions: Extensions | None = None
) -> int:
    """Check the machine, train and export the model, and return the exit status."""
    extensions = extensions or Extensions()
    check_libraries(config)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(session(config.trainer, from_python=extensions.from_python))
        run.say_choices(config)
        trainer = stack.enter_context(trainer_class(config))
        trainer.on_step = extensions.on_step
        saved = trainer.prepare()
        with run.tracking(trainer.config, trainer.total_steps, saved) as tracking, frozen_objects():
            stop = run.listen(ctrl_c=extensions.from_python)
            trainer.fit(tracking, stop)
            trainer.finish_saving()  # trackers must not report the run as finished before its checkpoints are written
            if stop.status:
                tracking.ending = "stopped"
        if stop.status:
            run.say_how_to_resume()
        else:
            run.say(f"wrote {config.export_path()}")
            steps_per_epoch = trainer.loader.steps_per_epoch
            run.say_results(trainer.total_steps, steps_per_epoch, config.export_path())
    return stop.status
