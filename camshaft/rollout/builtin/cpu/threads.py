"""Number of threads of a decode step on a CPU: one for few rows.

    with limited_threads(forward, model) as forward:
        logits = forward(tokens, positions, step)
        ...                                             # sampling uses the threads of the step

Starting and joining threads takes longer than they save in the small products of such a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from camshaft.models.attention import Slots
from camshaft.rollout.builtin.decode_trace import Forward

MIN_PRODUCT = 2_000_000
"""Multiplications of an average product of a step from which on all threads are used. With two threads, steps below
took up to 1.3 times as long as with one, and steps above down to 0.7 times (benchmarks/results/generation_threads.md).
"""


@contextmanager
def limited_threads(forward: Forward, model: nn.Module) -> Iterator[Forward]:
    """Yield a forward that selects one thread if the rows are few for the size of the model's weights."""
    threads, weights = torch.get_num_threads(), [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    if threads == 1 or not weights or weights[0].device.type != "cpu":
        yield forward
        return
    min_rows = MIN_PRODUCT * len(weights) / sum(weight.numel() for weight in weights)

    def limited(tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
        torch.set_num_threads(threads if len(tokens) >= min_rows else 1)
        return forward(tokens, positions, slots)

    try:
        yield limited
    finally:
        torch.set_num_threads(threads)
