"""The hybrid engine: a context in which the rollout provably holds the engine's present weights.

        engine.eval_mode: parameters are where they can be read, gradients and optimizer where they rest
          -> rollout.wake_up: memory for generation
          -> named_weights, cast to what the rollout computes with -> load_weights; digests of what goes
          -> rollout.weight_digests, computed anew from what it has: any that differs is an error by name
          -> the engine puts its parameters away again, unless the rollout may share them
          -> the caller generates
          -> rollout.sleep: that memory is given back

Weights are handed over at every entry, and each hand-over has a number. A rollout that can share the engine's
storage makes that a matter of pointers; one that cannot pays for a copy, and the report says how much. Where the
rollout is told of an adapter (`config.lora`), base weights go over once, and then the adapter alone.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from camshaft.device import peak_memory, release_cache
from camshaft.digest import digest
from camshaft.engine import BaseEngine
from camshaft.errors import RolloutError
from camshaft.models.lora import with_scaling
from camshaft.rollout import BaseRollout

SHOWN = 8
"""So many names are in an error; the others are counted."""


@dataclass
class Sync:
    """What one hand-over moved, and what it took."""

    version: int
    bytes: int = 0
    seconds: float = 0.0
    """From waking the rollout to the last digest."""
    check_seconds: float = 0.0
    """Of these, for digests on both sides."""
    peak_memory: int = 0
    """The most bytes so far: of tensors on the engine's device, or of this process where that is the CPU."""
    digests: dict[str, int] = field(default_factory=dict, repr=False)
    """Of what was sent, by name."""
    as_it_is: bool = False
    """Whether any tensor of the engine's went as it is, not cast."""

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/sync_bytes": float(self.bytes),
            "perf/sync_peak_memory_bytes": float(self.peak_memory),
            "timing_s/sync": self.seconds,
            "timing_s/sync_check": self.check_seconds,
        }

    def sent(self, weights: Iterator[tuple[str, Tensor]], rollout: BaseRollout) -> Iterator[tuple[str, Tensor]]:
        """The weights as they go to `rollout`, counted and digested."""
        for name, tensor in weights:
            going = tensor.detach().to(rollout.arrival_dtype(name, tensor))
            self.bytes += going.numel() * going.element_size()
            self.as_it_is |= going.dtype == tensor.dtype
            start = time.perf_counter()
            self.digests[name] = digest(going)
            self.check_seconds += time.perf_counter() - start
            yield name, going

    def check(self, held: Mapping[str, int], before: Mapping[str, int]) -> None:
        """Compare with what the rollout has; `before` is what the last hand-over sent to it."""
        differ = [name for name, number in self.digests.items() if held.get(name, number) != number]
        stale = [name for name in differ if held[name] == before.get(name)]
        wrong = {
            "not there": [name for name in self.digests if name not in held],
            "there without having been sent": [name for name in held if name not in self.digests],
            "stale, still as the hand-over before sent it": stale,
            "other than what was sent": [name for name in differ if name not in stale],
        }
        told = [f"{_some(names)}: {what}" for what, names in wrong.items() if names]
        if told:
            raise RolloutError(
                f"hand-over {self.version}: the rollout does not hold the engine's weights. {'; '.join(told)}. "
                "Nothing was generated with them. Look at the generator's load_weights() "
                "(camshaft check-rollout tries one by itself)"
            )


@contextlib.contextmanager
def rollout_mode(engine: BaseEngine, rollout: BaseRollout) -> Iterator[Sync]:
    """`rollout` generates with the weights that `engine` has now."""
    with contextlib.ExitStack() as parameters:
        parameters.enter_context(engine.eval_mode())
        try:
            sync = _hand_over_of(engine, rollout)
            if not (rollout.keeps_tensors and sync.as_it_is):
                parameters.close()
            yield sync
        except BaseException as error:
            _sleep_after(error, rollout)
            raise
        rollout.sleep()


def hand_over(weights: Iterator[tuple[str, Tensor]], rollout: BaseRollout, device: str) -> Sync:
    """Wake `rollout`, give it `weights`, whose owner is on `device`, and see that it has them."""
    with _handing_over(rollout, device) as sync:
        rollout.load_weights(sync.sent(weights, rollout))
    return sync


def _hand_over_of(engine: BaseEngine, rollout: BaseRollout) -> Sync:
    """All weights of `engine`; or its adapter, the first time behind the base weights, which are there ever after."""
    lora = rollout.config.lora
    if lora is None:
        return hand_over(engine.named_weights(), rollout, engine.config.device)
    with _handing_over(rollout, engine.config.device) as sync:
        base = rollout.base_sent if rollout.base_owner is not None and rollout.base_owner() is engine else None
        rollout.base_sent, rollout.base_owner = None, weakref.ref(engine)
        if base is None:
            with engine.disable_adapter():
                rollout.load_weights(sync.sent(engine.named_weights(), rollout))
            base = dict(sync.digests)
        sync.digests.update(base)
        adapter = with_scaling(engine.named_weights(adapter_only=True), lora)
        rollout.load_adapter(sync.sent(adapter, rollout))
    rollout.base_sent = base
    return sync


@contextlib.contextmanager
def _handing_over(rollout: BaseRollout, device: str) -> Iterator[Sync]:
    """Around what gives weights to `rollout`: awake before it, and seen to have them after it."""
    start = time.perf_counter()
    if not rollout.keeps_tensors:
        release_cache(torch.device(device))  # what wakes up has another allocator
    rollout.wake_up()
    rollout.weights_version += 1
    sync = Sync(rollout.weights_version)
    yield sync
    loaded = time.perf_counter()
    before, rollout.weights_sent = rollout.weights_sent, sync.digests
    sync.check(rollout.weight_digests(), before)
    end = time.perf_counter()
    sync.check_seconds += end - loaded
    sync.seconds = end - start
    sync.peak_memory = peak_memory(device)


def _sleep_after(error: BaseException, rollout: BaseRollout) -> None:
    """Give the memory back; a generator that is broken may not be able to, and the first error is the one to tell."""
    try:
        rollout.sleep()
    except Exception as second:
        error.add_note(f"Nor could the rollout be put to sleep: {second}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
