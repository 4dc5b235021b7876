"""A reward model that is trained on preference pairs.

Reads `chosen`, `rejected` and `margin`; writes `chosen_scores` and `rejected_scores`.

For the engine, a pair is one row with both sequences joined, so that micro-batches and ranks never split a pair. The
engine's hooks split the pairs before the model and join their scores after it.
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
    """Add `input_ids`: both sequences of a pair, joined."""
    return data.with_columns(input_ids=Ragged.join(data.ragged("chosen"), data.ragged("rejected")))


def split_pairs(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
    """Return the input of the model: all chosen sequences, then all rejected ones."""
    both = Ragged.concat([data.ragged("chosen"), data.ragged("rejected")])
    return DataProto.from_dict({"input_ids": both}), ctx


def join_scores(outputs: Any, ctx: StepContext) -> tuple[dict[str, Tensor], StepContext]:
    """Return the scores of both sequences of each pair."""
    chosen, rejected = outputs["scores"].chunk(2)
    return {"chosen_scores": chosen, "rejected_scores": rejected}, ctx


class RMWorker(SupervisedWorker):
    """Sequence classifier with one label, and its optimizer."""

    def __init__(self, config: RMConfig, total_steps: int):
        super().__init__(config, rm_engine(config, total_steps))
        self.config = config

    def optimizer_step(self, data: DataProto) -> StepResult:
        return self.engine.train_batch(as_pairs(data), None, self._loss, split_pairs, join_scores)

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
        """Compute `chosen_scores` and `rejected_scores`."""
        with self.engine.eval_mode():
            predictions = self.engine.infer_batch(as_pairs(data), None, split_pairs, join_scores)
        return DataProto.from_dict({name: scores.cpu() for name, scores in predictions.items()})
