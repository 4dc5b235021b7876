"""A reward model that is trained, on pairs of answers.

Reads `chosen`, `rejected` and `margin`; writes `chosen_scores` and `rejected_scores`.

For the engine a pair is one row, the two sequences one behind the other: wherever it cuts a batch, into micro-batches
or over ranks, both are on one side. The hooks that it runs around the model take a pair apart and put it together.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from camshaft.algorithms import preference_loss
from camshaft.config import RMConfig, rm_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import StepContext, StepResult
from camshaft.roles.supervised import SupervisedWorker


def as_pairs(data: DataProto) -> DataProto:
    """`data` with `input_ids`: both sequences of a pair as one row."""
    return data.with_columns(input_ids=Ragged.join(data.ragged("chosen"), data.ragged("rejected")))


def apart(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
    """The sequences that the model reads: all chosen ones, then all rejected ones."""
    both = Ragged.concat([data.ragged("chosen"), data.ragged("rejected")])
    return DataProto.from_dict({"input_ids": both}), ctx


def together(outputs: Any, ctx: StepContext) -> tuple[dict[str, Tensor], StepContext]:
    """The scores of both sequences of each pair."""
    chosen, rejected = outputs["scores"].chunk(2)
    return {"chosen_scores": chosen, "rejected_scores": rejected}, ctx


class RMWorker(SupervisedWorker):
    """Sequence classifier of one label, and its optimizer."""

    def __init__(self, config: RMConfig, total_steps: int):
        super().__init__(config, rm_engine(config, total_steps))
        self.config = config

    def learn(self, data: DataProto) -> StepResult:
        return self.engine.train_batch(as_pairs(data), None, self._loss, apart, together)

    def _loss(self, data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
        loss, ctx["metrics"] = preference_loss(
            predictions["chosen_scores"],
            predictions["rejected_scores"],
            data["margin"],
            ctx["num_sequences"],
            center=self.config.center_rewards_coefficient,
        )
        return loss, ctx

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_scores(self, data: DataProto) -> DataProto:
        """`chosen_scores` and `rejected_scores`."""
        with self.engine.eval_mode():
            found = self.engine.infer_batch(as_pairs(data), None, apart, together)
        return DataProto.from_dict({name: scores.cpu() for name, scores in found.items()})
