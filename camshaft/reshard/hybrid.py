"""The hybrid engine: a context in which the rollout holds the engine's present weights.

        engine.eval_mode: parameters are where they can be read
          -> rollout.wake_up: memory for generation
          -> named_weights -> load_weights, counted on the way
          -> the caller generates
          -> rollout.sleep: that memory is given back, the engine puts away what it had put away

Weights are handed over at every entry. A rollout that can share the engine's storage makes that a matter
of pointers; one that cannot pays for a copy, and the report says how much.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from camshaft.engine import BaseEngine
from camshaft.rollout import BaseRollout


@dataclass
class Sync:
    """What one hand-over moved."""

    bytes: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        return {"rollout/sync_bytes": float(self.bytes), "timing_s/sync": self.seconds}

    def count(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the weights on, adding up their size."""
        for name, tensor in weights:
            self.bytes += tensor.numel() * tensor.element_size()
            yield name, tensor


@contextlib.contextmanager
def rollout_mode(engine: BaseEngine, rollout: BaseRollout) -> Iterator[Sync]:
    """`rollout` generates with the weights that `engine` has now."""
    sync = Sync()
    with engine.eval_mode():
        start = time.perf_counter()
        rollout.wake_up()
        rollout.load_weights(sync.count(engine.named_weights()))
        sync.seconds = time.perf_counter() - start
        try:
            yield sync
        finally:
            rollout.sleep()
