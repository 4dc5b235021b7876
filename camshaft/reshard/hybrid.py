"""The hybrid engine: a context manager that syncs the engine's weights to the rollout and verifies them.

        engine.eval_mode: load the parameters, offload gradients and optimizer state
          -> rollout.wake_up: allocate memory for generation
          -> named_weights, cast to the dtype of the rollout, digested -> load_weights
          -> rollout.weight_digests, recomputed by the receiver: a difference raises an error with the weight's name
          -> offload the parameters again, unless the rollout shares them
          -> the caller generates
          -> rollout.sleep: free the memory

Every entry syncs the weights, and syncs are numbered. A rollout that shares the engine's storage exchanges only
pointers; any other copies, and `Sync` records bytes and seconds. If the rollout loads adapters (`config.lora`), the
first sync sends the base weights and the adapter, and later ones send only the adapter.
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
"""Maximum number of weight names in an error message; the others are counted."""


@dataclass
class Sync:
    """Size, duration and digests of one weight sync."""

    version: int
    bytes: int = 0
    seconds: float = 0.0
    """Time from `wake_up` to the last digest."""
    check_seconds: float = 0.0
    """Part of `seconds` spent on digests, on both sides."""
    peak_memory: int = 0
    """Peak memory so far in bytes: of tensors on the engine's device, or of this process if the device is the CPU."""
    digests: dict[str, int] = field(default_factory=dict, repr=False)
    """Digests of the sent weights, by name."""
    shares_storage: bool = False
    """True if any tensor was sent without a cast."""

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/sync_bytes": float(self.bytes),
            "perf/sync_peak_memory_bytes": float(self.peak_memory),
            "timing_s/sync": self.seconds,
            "timing_s/sync_check": self.check_seconds,
        }

    def sent(self, weights: Iterator[tuple[str, Tensor]], rollout: BaseRollout) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in the rollout's dtype; record their sizes and digests."""
        for name, tensor in weights:
            cast = tensor.detach().to(rollout.sync_dtype(name, tensor))
            self.bytes += cast.numel() * cast.element_size()
            self.shares_storage |= cast.dtype == tensor.dtype
            start = time.perf_counter()
            self.digests[name] = digest(cast)
            self.check_seconds += time.perf_counter() - start
            yield name, cast

    def check(self, received: Mapping[str, int], previous: Mapping[str, int]) -> None:
        """Compare the sent digests with `received`, the rollout's; `previous` are those of the last weight sync."""
        different = [name for name, number in self.digests.items() if received.get(name, number) != number]
        stale = [name for name in different if received[name] == previous.get(name)]
        problems = {
            "missing in the rollout": [name for name in self.digests if name not in received],
            "in the rollout, but never sent": [name for name in received if name not in self.digests],
            "stale, unchanged since the previous weight sync": stale,
            "different from what was sent": [name for name in different if name not in stale],
        }
        descriptions = [f"{_some(names)}: {problem}" for problem, names in problems.items() if names]
        if descriptions:
            raise RolloutError(
                f"weight sync {self.version}: the weights of the rollout differ from the engine's. "
                f"{'; '.join(descriptions)}. Nothing was generated with them. Check the generator's load_weights() "
                "with `camshaft check-rollout`"
            )


@contextlib.contextmanager
def rollout_mode(engine: BaseEngine, rollout: BaseRollout) -> Iterator[Sync]:
    """Sync the weights of `engine` to `rollout` on entry; put the rollout to sleep on exit."""
    with contextlib.ExitStack() as parameters:
        parameters.enter_context(engine.eval_mode())
        try:
            sync = _sync_engine(engine, rollout)
            if not (rollout.keeps_tensors and sync.shares_storage):
                parameters.close()
            yield sync
        except BaseException as error:
            _sleep_after(error, rollout)
            raise
        rollout.sleep()


def sync_weights(weights: Iterator[tuple[str, Tensor]], rollout: BaseRollout, device: str) -> Sync:
    """Wake `rollout`, load `weights` from a sender on `device`, and verify them."""
    with _verified_sync(rollout, device) as sync:
        rollout.load_weights(sync.sent(weights, rollout))
    return sync


def _sync_engine(engine: BaseEngine, rollout: BaseRollout) -> Sync:
    """Sync all weights of `engine`; with LoRA, the adapter, and before the first adapter the base weights."""
    lora = rollout.config.lora
    if lora is None:
        return sync_weights(engine.named_weights(), rollout, engine.config.device)
    with _verified_sync(rollout, engine.config.device) as sync:
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
def _verified_sync(rollout: BaseRollout, device: str) -> Iterator[Sync]:
    """Wake `rollout` on entry; verify its digests on exit. The body loads the weights."""
    start = time.perf_counter()
    if not rollout.keeps_tensors:
        release_cache(torch.device(device))  # the rollout has its own allocator
    rollout.wake_up()
    rollout.weights_version += 1
    sync = Sync(rollout.weights_version)
    yield sync
    loaded = time.perf_counter()
    previous, rollout.weights_sent = rollout.weights_sent, sync.digests
    sync.check(rollout.weight_digests(), previous)
    end = time.perf_counter()
    sync.check_seconds += end - loaded
    sync.seconds = end - start
    sync.peak_memory = peak_memory(device)


def _sleep_after(error: BaseException, rollout: BaseRollout) -> None:
    """Free the rollout's memory. A failure becomes a note, so that the first error is the one raised."""
    try:
        rollout.sleep()
    except Exception as second:
        error.add_note(f"The rollout could not be put to sleep either: {second}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
