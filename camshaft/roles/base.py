"""Base classes of roles, and conversions between the columns of a role and those of an engine.

A role has a batch with `prompts` and `responses`. `as_sequences` adds the columns `input_ids` and `loss_mask`, which
the engine reads. The engine returns predictions for all tokens of a sequence, and `select_responses` selects those of
the response. A trained role loops over mini-batches:

    with self.update() as metrics:
        for mini_batch in mini_batches(data, size=8, epochs=1, seed=0, presharded=False):
            metrics.add(self.engine.train_batch(mini_batch, ctx, self._loss))
    return metrics.result("actor")

`SkippedSteps` reports optimizer steps that an engine has skipped, and `has_finite_outputs` probes the model before a
checkpoint is saved. The trainer uses both to stop a run that has diverged.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from camshaft import storage
from camshaft.algorithms import Counts
from camshaft.checkpoint import Probe, export_hugging_face
from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import BaseEngine, StepContext, StepResult
from camshaft.progress import track
from camshaft.roles.sequences import SEQUENCES, split_rows, whole_rows
from camshaft.seat import Seat


def token_columns(data: DataProto) -> tuple[str, ...]:
    """Return the names of the columns that roles read for a forward pass over the batch."""
    return ("prompts", "responses", "response_mask", *([SEQUENCES] if SEQUENCES in data else []))


def as_sequences(data: DataProto) -> DataProto:
    """Add `input_ids`, prompt followed by response, and `loss_mask`, True for tokens that the policy sampled."""
    prompts, responses, mask = data.ragged("prompts"), data.ragged("responses"), data.ragged("response_mask")
    rows = data.with_columns(**DataProto.from_responses(prompts, responses, loss_mask=mask).columns)
    return split_rows(rows) if SEQUENCES in data else rows


def select_responses(predictions: Mapping[str, Any], name: str, data: DataProto) -> Ragged:
    """Return a prediction at the response tokens."""
    return predictions[name].suffix(data.ragged("responses").lengths)


def loss_counts(data: DataProto, ctx: StepContext, horizon: float) -> Counts:
    """Return the mask of a micro-batch of responses with the counts of its mini-batch."""
    weights = data["sequence_weight"] if "sequence_weight" in data else None  # noqa: SIM401
    return Counts.of(data.ragged("response_mask"), ctx, horizon, weights)


def mini_batches(data: DataProto, size: int, epochs: int, seed: int | None, presharded: bool) -> Iterator[DataProto]:
    """Yield the mini-batches of all epochs, of `size` rows on each rank, with the columns that the engine reads.

    `seed` shuffles each epoch; None disables shuffling. If `presharded` is True, `data` already contains the rows of
    all epochs in order (`trainer/mini_batches.py`).
    """
    epochs, seed = (1, None) if presharded else (epochs, seed)
    batches = map(as_sequences, data.make_iterator(size, epochs, seed))
    return track(batches, epochs * len(data) // max(1, size), "mini-batches")


@dataclass(frozen=True)
class SkippedSteps:
    """Consecutive optimizer steps that were skipped because the gradient was not finite, up to the latest step."""

    steps: int = 0
    updates: int = 0
    """Consecutive updates, up to the latest one, in which every optimizer step was skipped."""
    cause: str | None = None
    """What was not finite in the latest skipped step: the loss, or the gradient of a parameter on this rank."""


class UpdateMetrics:
    """Metrics of an update: means over its optimizer steps, the learning rate and the number of skipped steps."""

    def __init__(self, engine: BaseEngine, skipped: SkippedSteps):
        self._engine, self._learning_rate = engine, engine.learning_rate
        self._sums: dict[str, float] = defaultdict(float)
        self._steps = self._skipped = 0
        self._before, self._in_a_row, self._cause = skipped, skipped.steps, skipped.cause

    def add(self, step: StepResult) -> None:
        self._steps, self._skipped = self._steps + 1, self._skipped + step.skipped
        self._in_a_row = self._in_a_row + 1 if step.skipped else 0
        if step.skipped:
            name = self._engine.non_finite_gradient()
            gradient = None if name is None else f"the gradient of {name}"
            self._cause = gradient if math.isfinite(step.loss) else "the loss"
        for name, value in (step.metrics | {"grad_norm": step.grad_norm}).items():
            self._sums[name] += value

    def result(self, prefix: str) -> dict[str, float]:
        """Return the metrics with names `<prefix>/<name>`."""
        metrics = {name: value / self._steps for name, value in self._sums.items()}
        metrics |= {"lr": self._learning_rate, "skipped_steps": float(self._skipped)}
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    def skipped_steps(self) -> SkippedSteps:
        """Return the consecutive skipped steps, including those of earlier updates."""
        updates = self._before.updates + 1 if self._skipped == self._steps else 0
        return SkippedSteps(self._in_a_row, updates, self._cause)


class EngineRole(Worker):
    """Base class of roles with an engine."""

    engine: BaseEngine

    @property
    def seat(self) -> Seat:
        return self.engine.seat

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.engine.init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Save the complete state of the engine in the folder `local_path`."""
        self.engine.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_checkpoint(self) -> None:
        """Wait until the background thread of `save_checkpoint` has finished, and raise its error if it failed."""
        self.engine.wait_for_checkpoint()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        """Load the state that `save_checkpoint` saved."""
        self.engine.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def infer(self, data: DataProto, ctx: StepContext) -> Mapping[str, Any]:
        """Compute predictions for `data` without gradients."""
        with self.engine.eval_mode():
            predictions = self.engine.infer_batch(as_sequences(data), ctx)
        return whole_rows(predictions, data) if SEQUENCES in data else predictions


class TrainedRole(EngineRole):
    """Base class of roles whose model is trained and can be exported."""

    compute_dtype: str
    """Compute dtype of the engine, which can be lower than the dtype of the weights."""
    _skipped = SkippedSteps()

    @contextmanager
    def update(self) -> Iterator[UpdateMetrics]:
        """Enter train mode for the optimizer steps of one update, then advance the learning-rate schedule by one step.

        The schedule therefore counts updates of the trainer, not optimizer steps.
        """
        metrics = UpdateMetrics(self.engine, self._skipped)
        with self.engine.train_mode():
            yield metrics
            self.engine.optimizer_zero_grad()  # frees the memory of the gradients until the next update
        self.engine.lr_scheduler_step()
        self._skipped = metrics.skipped_steps()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def skipped_steps(self) -> SkippedSteps:
        """Return the consecutive skipped optimizer steps up to now."""
        return self._skipped

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def has_finite_outputs(self) -> bool:
        """Run the model on two rows, and return True if all outputs and weights on this rank are finite.

        Numbers whose squares overflow in float32 count as not finite: a model with such weights has diverged. There are
        two lengths, because the attention kernels of some processors replace NaN in short rows with zeros.
        """
        ids = Ragged.from_rows([torch.arange(8), torch.arange(32) % 8])
        rows = DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() > 0)})
        with self.engine.eval_mode():
            predictions = self.engine.infer_batch(rows)
            weight = self.engine.overflowing_weight()
        outputs = (value.values if isinstance(value, Ragged) else value for value in predictions.values())
        return weight is None and all(bool(output.float().square().isfinite().all()) for output in outputs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, local_path: str, hdfs_path: str | None = None, tokenizer: str | None = None) -> None:
        """Export the model in Hugging Face format to the folder `local_path`, and copy the folder to `hdfs_path`.

        `tokenizer` is the folder of the tokenizer; None uses the folder of the model. A LoRA adapter is merged into the
        weights and also saved in the subfolder `lora_adapter`.
        """
        engine, is_writer = self.engine, self.seat.rank == 0
        model = engine.config.model
        with engine.eval_mode():
            export_hugging_face(
                engine.named_weights(),
                model,
                local_path,
                check=Probe(engine.infer_batch, self.compute_dtype),
                write=is_writer,
                adapter=() if model.lora is None else engine.named_weights(adapter_only=True),
                tokenizer=tokenizer,
            )
        if is_writer and hdfs_path is not None:
            storage.copy_folder(local_path, hdfs_path)
