"""Seeds as functions of the run's seed, the step and the row.

A run that resumes at step 10 draws the same numbers in step 11 as an uninterrupted run, without a saved generator
state. The samples of a row do not depend on the rank that generates them.
"""

import torch
from torch import Tensor

VALIDATION = 0
"""Step number of validation; training steps start at 1."""

_ROWS = 1 << 24
_STEPS = 1 << 20


def sampling_seeds(seed: int, step: int, num_rows: int, first: int = 0) -> Tensor:
    """Return a seed per row from row `first` on, (num_rows,) int64, unique per (seed mod 2**18, step, row)."""
    return torch.arange(first, first + num_rows) + _ROWS * (step + _STEPS * (seed % (1 << 18)))


def shuffle_seed(seed: int, step: int) -> int:
    """Return the seed of the mini-batch order of a step; torch uses 32 bits, so it is unique per seed mod 2**12."""
    return step + _STEPS * seed
