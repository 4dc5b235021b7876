"""What roles share: whole sequences for the engine, mini-batches, metrics of an update.

A role that trains says which outputs it wants and what the loss is; `update` does the rest:

    metrics = self.update(data, self._loss, ctx, UpdatePlan(mini_batch_size=8, epochs=1, seed=0))

The batch of a role has `prompts` and `responses`; an engine sees `input_ids` and `loss_mask`. What comes
back from an engine is per token of the whole sequence; `of_responses` takes the part that a role means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from camshaft import storage
from camshaft.algorithms import Counts
from camshaft.checkpoint import Probe, export_hugging_face
from camshaft.controller import Dispatch, Worker, register
from camshaft.dataproto import DataProto, Ragged
from camshaft.device import to_device
from camshaft.engine import BaseEngine, StepContext
from camshaft.engine.base import LossFn, PreprocessFn
from camshaft.seat import Seat


def as_sequences(data: DataProto) -> DataProto:
    """`data` with `input_ids` and `loss_mask`: prompt and response as one row, outputs wanted of the response."""
    prompts, responses, mask = data.ragged("prompts"), data.ragged("responses"), data.ragged("response_mask")
    nothing = prompts.like(mask.values.new_zeros(len(prompts.values)))
    return data.with_columns(input_ids=Ragged.join(prompts, responses), loss_mask=Ragged.join(nothing, mask))


def of_responses(predictions: Mapping[str, Any], name: str, data: DataProto) -> Ragged:
    """The part of a prediction that speaks of the response tokens."""
    return predictions[name].suffix(data.ragged("responses").lengths)


def counts_of(data: DataProto, ctx: StepContext, horizon: float | None = None) -> Counts:
    """What a loss divides by: the mask of this micro-batch, the counts of the whole mini-batch."""
    mask = data.ragged("response_mask")
    lengths = to_device(mask.lengths, mask.values.device)
    return Counts(mask.values, lengths, ctx["num_tokens"], ctx["num_sequences"], horizon)


@dataclass(frozen=True)
class UpdatePlan:
    """How a role goes through its batch; sizes are this rank's."""

    mini_batch_size: int
    epochs: int
    seed: int | None
    """Shuffles each epoch; None keeps the order."""

    def of(self, dealt: bool) -> UpdatePlan:
        """The plan for rows that were dealt by `trainer/mini_batches.py`: in the order of all epochs."""
        return replace(self, epochs=1, seed=None) if dealt else self


class EngineRole(Worker):
    """A role with an engine."""

    engine: BaseEngine

    @property
    def seat(self) -> Seat:
        return self.engine.seat

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the engine's model."""
        self.engine.init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write the engine's whole state to the folder `local_path`."""
        self.engine.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_checkpoint(self) -> None:
        """Return when what `save_checkpoint` writes in the background is there; raise its error if it failed."""
        self.engine.wait_for_checkpoint()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True) -> None:
        """Read what `save_checkpoint` wrote."""
        self.engine.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def infer(self, data: DataProto, ctx: StepContext) -> Mapping[str, Any]:
        """Predictions for `data`, without gradients."""
        with self.engine.eval_mode():
            return self.engine.infer_batch(as_sequences(data), ctx)


class TrainedRole(EngineRole):
    """A role whose model changes, and is worth taking out of the run."""

    computes_in: str
    """Number format that the engine computes in, which can be less exact than that of its weights."""

    def update(
        self,
        data: DataProto,
        loss_fn: LossFn,
        ctx: StepContext,
        plan: UpdatePlan,
        before: PreprocessFn | None = None,
        found: list[Mapping[str, Any]] | None = None,
    ) -> dict[str, float]:
        """One optimizer step per mini-batch; returns metrics averaged over the steps, and the rate they used.

        The schedule moves once per call: its steps are iterations of the trainer. Where there is a list `found`, the
        predictions of each step are put into it.
        """
        sums: dict[str, float] = defaultdict(float)
        steps = skipped = 0
        batch, rate = as_sequences(data), self.engine.learning_rate
        with self.engine.train_mode():
            for mini_batch in batch.make_iterator(plan.mini_batch_size, plan.epochs, plan.seed):
                result = self.engine.train_batch(mini_batch, ctx, loss_fn, before)
                steps, skipped = steps + 1, skipped + result.skipped
                if found is not None:
                    found.append(result.predictions)
                for name, value in (result.metrics | {"grad_norm": result.grad_norm}).items():
                    sums[name] += value
            self.engine.optimizer_zero_grad()  # nobody needs them until the next update
        metrics = {name: value / steps for name, value in sums.items()}
        self.engine.lr_scheduler_step()
        return metrics | {"lr": rate, "skipped_steps": float(skipped)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, local_path: str, hdfs_path: str | None = None, tokenizer: str | None = None) -> None:
        """Write the model to the folder `local_path` in the Hugging Face layout, and copy it to `hdfs_path`.

        `tokenizer` is the folder of the one that goes with it; None: the model's. An adapter is merged into the model,
        and by itself in the folder `lora_adapter` inside.
        """
        engine, writes = self.engine, self.seat.rank == 0
        model = engine.config.model
        with engine.eval_mode():
            export_hugging_face(
                engine.named_weights(),
                model,
                local_path,
                check=Probe(engine.infer_batch, self.computes_in),
                write=writes,
                adapter=() if model.lora is None else engine.named_weights(adapter_only=True),
                tokenizer=tokenizer,
            )
        if writes and hdfs_path is not None:
            storage.copy_folder(local_path, hdfs_path)
