"""Sharded engines with one bug each that only several ranks can show."""

from __future__ import annotations

from torch import Tensor

from camshaft.engine.fsdp import FSDPEngine


class AveragesOverRanks(FSDPEngine):
    """Average the gradients over ranks, as data parallelism usually does, although each loss is already a share."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss / self.meshes.layout.data)


class CountsItsOwnRows(FSDPEngine):
    """Divide by the counts of this rank."""

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return tensor


class KeepsItsShare(FSDPEngine):
    """Export only the shards of this rank."""

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return getattr(tensor, "to_local", lambda: tensor)()


CAUGHT_BY: dict[type[FSDPEngine], str] = {
    AveragesOverRanks: "step equals oracle",
    CountsItsOwnRows: "context",
    KeepsItsShare: "predictions",
}
"""A rule that detects each bug on two ranks."""
