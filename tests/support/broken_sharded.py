"""Sharded engines with one mistake each, of the kind that only several ranks show."""

from __future__ import annotations

from torch import Tensor

from camshaft.engine.fsdp import FSDPEngine


class AveragesOverRanks(FSDPEngine):
    """Takes the mean of the ranks' gradients, as data parallelism usually does, of a loss that is a share."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss / self.meshes.layout.data)


class CountsItsOwnRows(FSDPEngine):
    """Divides by the counts of this rank."""

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor


class KeepsItsShare(FSDPEngine):
    """Exports what this rank holds."""

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return getattr(tensor, "to_local", lambda: tensor)()


CAUGHT_BY: dict[type[FSDPEngine], str] = {
    AveragesOverRanks: "step equals oracle",
    CountsItsOwnRows: "context",
    KeepsItsShare: "predictions",
}
"""Each mistake, and a rule that must not hold on two ranks."""
