"""Position of a process in the parallel layout of its worker group.

Each engine declares the seat of its process. The controller splits batches and merges results only by seats, so the
dispatch modes do not depend on the backend. For example, all ranks of a tensor-parallel group have the same `dp_rank`,
and the results of only one of them are used.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """Rank, data-parallel rank and collection of results of a process."""

    rank: int = 0
    world: int = 1
    """World size."""
    dp_rank: int = 0
    """Data-parallel rank. The process receives slice `dp_rank` of a batch that is split into `dp_size` slices."""
    dp_size: int = 1
    collects: bool = True
    """True if the results of this process are merged into the result of the group."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank} must be at least 0 and less than world={self.world}")
        if not 0 <= self.dp_rank < self.dp_size <= self.world:
            raise ValueError(
                f"dp_rank={self.dp_rank} must be less than dp_size={self.dp_size}, which must be at most "
                f"world={self.world}"
            )


ONLY_RANK = Seat()
"""Seat of the only process of a group."""
