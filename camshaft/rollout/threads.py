"""How many threads a step of generation is worth: one, or all that there are.

    with step_threads(hf, num_layers=4) as threads:
        threads.serve(rows=128)             # all threads, from here on
        threads.serve(rows=5)               # of a small model: one
                                            # and behind it as many as before

Steps of few rows of a small model are over before a second thread has come in: it takes as much time of its core as
the first, and saves next to none. Scoring functions, which run meanwhile, have better uses for that core.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

WORTH = 2**23
"""From so many products in each layer on, a step is worth more than one thread; measured with two
(`benchmarks/results/rollout.md`)."""


class StepThreads:
    """What operators called here compute on; see the map above."""

    def __init__(self, products: float):
        """`products` are those of a layer, for each row."""
        self._products, self._all = products, torch.get_num_threads()
        self._now = self._all

    def serve(self, rows: int) -> None:
        """As many as a step of these rows is worth."""
        self._set(1 if rows * self._products < WORTH else self._all)

    def serve_all(self) -> None:
        self._set(self._all)

    def _set(self, wanted: int) -> None:
        if wanted != self._now:
            torch.set_num_threads(wanted)
            self._now = wanted


@contextmanager
def step_threads(hf: nn.Module, num_layers: int) -> Iterator[StepThreads]:
    """Inside, steps have the threads that they are worth. A model on another device keeps those that there are."""
    weights = list(hf.parameters())
    on_threads = all(weight.device.type == "cpu" for weight in weights)
    threads = StepThreads(sum(weight.numel() for weight in weights) / num_layers if on_threads else float("inf"))
    try:
        yield threads
    finally:
        threads.serve_all()
