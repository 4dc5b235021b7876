"""Role of a reward model that is trained on preference pairs.

`train_batch` reads the columns `chosen`, `rejected` and `margin`. `compute_scores` reads `chosen` and `rejected`, and
writes `chosen_scores` and `rejected_scores`.

A pair is passed to the engine as one row that joins both sequences, so that micro-batches and ranks never split a pair.
Hooks of the engine split the pairs before the forward pass and pair the scores after it.
"""

from typing import Any

from torch import Tensor

from camshaft.algorithms import preference_loss
from camshaft.config import RMConfig, rm_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import StepContext, StepResult
from camshaft.roles.supervised import SupervisedWorker


def add_pair_ids(data: DataProto) -> DataProto:
    """Add `input_ids`, the chosen sequence of a pair followed by the rejected one."""
    return data.with_columns(input_ids=Ragged.join(data.ragged("chosen"), data.ragged("rejected")))


def split_pairs(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
    """Return the input of the model: all chosen sequences followed by all rejected ones."""
    sequences = Ragged.concat([data.ragged("chosen"), data.ragged("rejected")])
    return DataProto.from_dict({"input_ids": sequences}), ctx


def pair_scores(outputs: Any, ctx: StepContext) -> tuple[dict[str, Tensor], StepContext]:
    """Split the scores into those of the chosen and of the rejected sequences."""
    chosen, rejected = outputs["scores"].chunk(2)
    return {"chosen_scores": chosen, "rejected_scores": rejected}, ctx


class RMWorker(SupervisedWorker):
    """A sequence classifier with one label and its optimizer."""

    def __init__(self, config: RMConfig, total_steps: int):
        super().__init__(config, rm_engine(config, total_steps))
        self.config = config

    def optimizer_step(self, data: DataProto) -> StepResult:
        return self.engine.train_batch(add_pair_ids(data), None, self._loss, split_pairs, pair_scores)

    def _loss(self, data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
        chosen, rejected = predictions["chosen_scores"], predictions["rejected_scores"]
        center = self.config.center_rewards_coefficient
        loss, ctx["metrics"] = preference_loss(chosen, rejected, data["margin"], ctx["num_sequences"], center=center)
        return loss, ctx

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_scores(self, data: DataProto) -> DataProto:
        """Compute the columns `chosen_scores` and `rejected_scores`."""
        with self.engine.eval_mode():
            predictions = self.engine.infer_batch(add_pair_ids(data), None, split_pairs, pair_scores)
        return DataProto.from_dict({name: scores.cpu() for name, scores in predictions.items()})
