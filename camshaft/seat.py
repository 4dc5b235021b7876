"""Position of a process in the parallel layout of its group.

Each engine declares the seat of its process. The controller splits and merges batches only by seats, so dispatch needs
no backend-specific modes: a tensor-parallel rank has the same `dp_rank` as its neighbors and does not collect.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """Rank `rank` of `world`, which processes slice `dp_rank` of `dp_size`; its results are used if `collects`."""

    rank: int = 0
    world: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    collects: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank={self.rank} is not below world={self.world}")
        if not 0 <= self.dp_rank < self.dp_size <= self.world:
            raise ValueError(f"dp_rank={self.dp_rank}, dp_size={self.dp_size}, world={self.world} do not fit")


ONLY_RANK = Seat()
"""Seat of a process without others."""
