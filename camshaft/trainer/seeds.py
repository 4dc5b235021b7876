"""Where the random numbers of a run come from: functions of the run's seed and the step, never of history.

A run that is resumed at step 10 draws what the undisturbed run drew at step 11, without any state of a
generator being saved, and a row's samples do not depend on the rank that computes them.
"""

import torch
from torch import Tensor

VALIDATION = 0
"""Stands in for the step where there is none: training steps count from 1."""

_ROWS = 1 << 24
_STEPS = 1 << 20


def sampling_seeds(seed: int, step: int, num_rows: int, first: int = 0) -> Tensor:
    """(num_rows,) int64 from row `first`, different for every (seed, step, row); seeds 2**18 apart share theirs."""
    return torch.arange(first, first + num_rows) + _ROWS * (step + _STEPS * (seed % (1 << 18)))


def shuffle_seed(seed: int, step: int) -> int:
    """Order of the mini-batches of one step; seeds that differ by 2**12 share theirs, torch reads 32 bits of it."""
    return step + _STEPS * seed
