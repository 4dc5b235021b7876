"""Where one process sits in the layout of its group.

An engine states its seat; the controller splits and merges batches by it and asks nothing else. With
that, dispatch needs no mode per backend: a tensor-parallel rank has the `dp_rank` of its neighbours
and does not collect.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """`rank` of `world`; reads slice `dp_rank` of `dp_size`; its results are kept if `collects`."""

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
