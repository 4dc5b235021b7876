"""How many threads a step of generation is worth: one, or all that there are.

    with step_threads(hf) as threads:
        threads.serve(rows=128, places=90)  # all threads, from here on
        threads.serve(rows=5, places=120)   # of a small model: one
                                            # and behind it as many as before

Steps of few rows of a small model are over before a second thread has come in: it takes as much time of its core as
the first, and saves next to none. Scoring functions, which run meanwhile, have better uses for that core.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

WORTH = 2**22
"""From so many products in a layer on, a step is worth more than one thread; measured with two
(`benchmarks/results/rollout.md`)."""


class StepThreads:
    """What operators called here compute on; see the map above."""

    def __init__(self, weights: float, width: int):
        """`weights` of a layer, and how wide the queries of all its heads are."""
        self._weights, self._width, self._all = weights, width, torch.get_num_threads()
        self._now = self._all

    def serve(self, rows: int, places: int) -> None:
        """As many as a step of these rows is worth, each of which looks at so many places."""
        products = rows * (self._weights + 2 * self._width * places)
        self._set(1 if products < WORTH else self._all)

    def serve_all(self) -> None:
        self._set(self._all)

    def _set(self, wanted: int) -> None:
        if wanted != self._now:
            torch.set_num_threads(wanted)
            self._now = wanted


@contextmanager
def step_threads(hf: PreTrainedModel) -> Iterator[StepThreads]:
    """Inside, steps have the threads that they are worth. A model on another device keeps those that there are."""
    config, weights = hf.config.get_text_config(), list(hf.parameters())
    on_threads = all(weight.device.type == "cpu" for weight in weights)
    each = sum(weight.numel() for weight in weights) / config.num_hidden_layers if on_threads else float("inf")
    threads = StepThreads(each, config.hidden_size)
    try:
        yield threads
    finally:
        threads.serve_all()
