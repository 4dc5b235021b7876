"""The hybrid engine: switches a rollout between training and generation, and verifies the weights that it receives.

    sync = enter(engine, rollout)
      engine.share_weights     move the parameters to the device; gradients and optimizer state stay offloaded
      -> rollout.wake_up       allocate memory for generation, unless the rollout is awake
      -> load_weights          send `named_weights`, and compute their digests in the dtypes of the rollout
      -> weight_digests        the rollout recomputes the digests; a difference raises an error that names the weights
      -> leave share_weights   offload the parameters again, unless the rollout shares their storage
    ...                        the caller generates, once or several times
    leave(rollout)
      rollout.sleep            free the memory
      -> leave share_weights   the engine can train again

`rollout_mode` is the context manager around `enter` and `leave`. Every entry syncs the weights and increments the
version of the rollout. If the rollout shares storage with the engine, a sync passes pointers only, and `train_mode`
raises an error until `leave`; otherwise it copies. `sync_weights` always copies, so the engine can train while the
rollout stays awake. `Sync` records bytes and seconds. If the rollout loads adapters (`config.lora`), the first sync
sends the base weights and the adapter, and later syncs send only the adapter.
"""

import contextlib
import functools
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from camshaft.device import peak_memory, release_cache
from camshaft.digest import Digests
from camshaft.engine import BaseEngine
from camshaft.engine.base import DtypeOf
from camshaft.errors import RolloutError
from camshaft.models.lora import apply_scaling
from camshaft.rollout import BaseRollout
from camshaft.rollout.base import Loader, load_with_version

Weights = Iterator[tuple[str, Tensor]]

MAX_NAMES = 8
"""Maximum number of weight names in an error message. Further names are only counted."""


@dataclass
class Sync:
    """Size, duration and digests of one weight sync."""

    version: int
    """Number of the sync to this rollout, counted from 1."""
    bytes: int = 0
    seconds: float = 0.0
    """Time from `wake_up` to the last digest."""
    check_seconds: float = 0.0
    """Seconds spent on computing digests, in the engine and in the rollout. Part of `seconds`. On a GPU, this includes
    waiting for copies that were queued before."""
    peak_memory: int = 0
    """Peak memory in bytes since the start: of tensors on the engine's device, or of this process on a CPU."""
    digests: dict[str, int] = field(default_factory=dict, repr=False)
    """Digests of the weights that the engine has sent, by name."""
    shares_storage: bool = False
    """True if at least one weight needs no cast, so the rollout may share the engine's storage."""

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/sync_bytes": float(self.bytes),
            "perf/sync_peak_memory_bytes": float(self.peak_memory),
            "timing_s/sync": self.seconds,
            "timing_s/sync_check": self.check_seconds,
        }

    def dtype_of(self, rollout: BaseRollout, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which `rollout` receives a weight, and record whether the weight needs no cast."""
        dtype = rollout.sync_dtype(name, tensor)
        self.shares_storage |= dtype == tensor.dtype
        return dtype

    def cast(self, weights: Weights, rollout: BaseRollout) -> Weights:
        """Yield the weights in the dtypes in which `rollout` receives them."""
        for name, tensor in weights:
            yield name, tensor.detach().to(self.dtype_of(rollout, name, tensor))

    def record(self, weights: Weights, live_dtype_of: DtypeOf | None = None) -> Weights:
        """Yield the weights, and record their sizes and digests. The host waits for the digests once, at the end.

        With `live_dtype_of`, the weights are live, and the rollout casts them to these dtypes. The sizes and digests
        are those after the cast.
        """
        digests = Digests(live=live_dtype_of is not None)
        try:
            for name, tensor in weights:
                dtype = live_dtype_of(name, tensor) if live_dtype_of else tensor.dtype
                self.bytes += tensor.numel() * dtype.itemsize
                start = time.perf_counter()
                digests.add(name, tensor, dtype)
                self.check_seconds += time.perf_counter() - start
                yield name, tensor
        finally:
            start = time.perf_counter()
            self.digests.update(digests.numbers())
            self.check_seconds += time.perf_counter() - start

    def check(self, received: Mapping[str, int], previous: Mapping[str, int]) -> None:
        """Raise `RolloutError` if the digests sent by the engine differ from `received`, those of the rollout.

        `previous` holds the digests sent in the previous weight sync, which are used to recognize stale weights.
        """
        different = [name for name, number in self.digests.items() if received.get(name, number) != number]
        stale_names = [name for name in different if received[name] == previous.get(name)]
        problems = {
            "missing in the rollout": [name for name in self.digests if name not in received],
            "in the rollout, but never sent by the engine": [name for name in received if name not in self.digests],
            "stale, unchanged since the previous weight sync": stale_names,
            "different from the weights sent by the engine": [name for name in different if name not in stale_names],
        }
        descriptions = [f"{_format_names(names)}: {problem}" for problem, names in problems.items() if names]
        if descriptions:
            raise RolloutError(
                f"weight sync {self.version}: the weights of the rollout differ from those of the engine. "
                f"{'; '.join(descriptions)}. No response was generated with these weights. Check the rollout's "
                "load_weights() with `camshaft check-rollout`"
            )


@dataclass
class SyncState:
    """State of the weight syncs to one rollout."""

    version: int = 0
    """Number of syncs. A counter is necessary because a fused optimizer may update a tensor without incrementing its
    version."""
    digests: Mapping[str, int] = field(default_factory=dict)
    """Digest of each weight in the latest sync, by name."""
    base: Mapping[str, int] | None = None
    """Digest of each loaded base weight, by name, if the rollout loads adapters."""
    base_owner: weakref.ref[BaseEngine] | None = None
    """Engine that has sent the base weights."""
    entered: bool = False
    """True between `enter` and `leave`."""
    shared: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Open while the rollout shares the storage of an engine's weights."""

    @staticmethod
    def of(rollout: BaseRollout) -> "SyncState":
        return _STATES.setdefault(rollout, SyncState())


_STATES: weakref.WeakKeyDictionary[BaseRollout, SyncState] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def rollout_mode(engine: BaseEngine, rollout: BaseRollout) -> Iterator[Sync]:
    """Sync the weights of `engine` to `rollout` on entry; put the rollout to sleep on exit."""
    sync = enter(engine, rollout)
    with asleep_after_error(rollout):
        yield sync
    leave(rollout)


def enter(engine: BaseEngine, rollout: BaseRollout) -> Sync:
    """Sync the weights of `engine` to `rollout`, awake or asleep, which stays awake until `leave`.

    If the rollout shares their storage, the parameters stay on the device, and the engine does not train until `leave`.
    After an error, the rollout is asleep.
    """
    state = SyncState.of(rollout)
    state.shared.close()
    with contextlib.ExitStack() as shared, asleep_after_error(rollout):
        shared.enter_context(engine.share_weights())
        sync = _sync(engine, rollout, copy=False)
        state.entered = True
        if rollout.keeps_tensors and sync.shares_storage:
            state.shared = shared.pop_all()
    return sync


def leave(rollout: BaseRollout) -> None:
    """Put `rollout` to sleep. The engine whose weights it has shared can train again."""
    state = SyncState.of(rollout)
    state.entered = False
    with state.shared:
        rollout.sleep()


def is_entered(rollout: BaseRollout) -> bool:
    """Return True between `enter` and `leave`."""
    return SyncState.of(rollout).entered


@contextlib.contextmanager
def asleep_after_error(rollout: BaseRollout) -> Iterator[None]:
    """Leave `rollout` if the block raises an error, which is raised again."""
    try:
        yield
    except BaseException as error:
        try:
            leave(rollout)
        except Exception as sleep_error:
            error.add_note(f"rollout.sleep() also failed: {sleep_error}")
        raise


def sync_weights(engine: BaseEngine, rollout: BaseRollout) -> Sync:
    """Sync copies of the weights of `engine` to `rollout`, awake or asleep, which stays awake.

    The engine can train while the rollout generates. After an error, the rollout is asleep.
    """
    SyncState.of(rollout).shared.close()
    with asleep_after_error(rollout), engine.eval_mode():
        return _sync(engine, rollout, copy=True)


def load_verified(weights: Weights, rollout: BaseRollout, device: str) -> Sync:
    """Wake `rollout`, load `weights` from a sender on `device`, and verify them."""
    with verified_sync(rollout, device) as sync:
        load_with_version(rollout, rollout.load_weights, sync.record(sync.cast(weights, rollout)), sync.version)
    return sync


def _sync(engine: BaseEngine, rollout: BaseRollout, copy: bool) -> Sync:
    """Sync the weights of `engine` to `rollout`: all weights or, if the rollout loads adapters, only the adapter.

    The first sync of an adapter also sends the base weights. With `copy`, the rollout gets no tensor of the engine.
    """
    lora, state = rollout.config.lora, SyncState.of(rollout)

    def send(load: Loader, weights: Weights) -> None:
        if copy and rollout.keeps_tensors:
            weights = ((name, tensor.clone()) for name, tensor in weights)
        load_with_version(rollout, load, weights, sync.version)

    with verified_sync(rollout, engine.config.device) as sync:
        dtype_of = functools.partial(sync.dtype_of, rollout)
        if lora is None:
            if rollout.casts_weights and engine.yields_live_weights:
                send(rollout.load_weights, sync.record(engine.named_weights(), dtype_of))
            else:
                send(rollout.load_weights, sync.record(engine.named_weights(dtype_of=dtype_of)))
            return sync
        base = state.base if state.base_owner is not None and state.base_owner() is engine else None
        state.base, state.base_owner = None, weakref.ref(engine)
        if base is None:
            with engine.disable_adapter():
                send(rollout.load_weights, sync.record(engine.named_weights(dtype_of=dtype_of)))
            base = dict(sync.digests)
        sync.digests.update(base)
        adapter = apply_scaling(engine.named_weights(adapter_only=True), lora)
        send(rollout.load_adapter, sync.record(sync.cast(adapter, rollout)))
    state.base = base
    return sync


@contextlib.contextmanager
def verified_sync(rollout: BaseRollout, device: str, version: int | None = None) -> Iterator[Sync]:
    """Wake `rollout` on entry, and verify its digests on exit. The caller loads `version`, by default the next one."""
    start, state = time.perf_counter(), SyncState.of(rollout)
    if not rollout.keeps_tensors:
        release_cache(torch.device(device))  # the rollout has another allocator, which cannot reuse cached memory
    rollout.wake_up()
    state.version = state.version + 1 if version is None else version
    sync = Sync(state.version)
    yield sync
    load_end = time.perf_counter()
    previous, state.digests = state.digests, sync.digests
    sync.check(rollout.weight_digests(), previous)
    if rollout.version != sync.version:
        raise RolloutError(
            f"weight sync {sync.version}: the rollout reports version {rollout.version}; load_weights() and "
            "load_adapter() of a rollout must set its `version` to their argument"
        )
    end = time.perf_counter()
    sync.check_seconds += end - load_end
    sync.seconds = end - start
    sync.peak_memory = peak_memory(device)


def _format_names(names: list[str]) -> str:
    """Join the first `MAX_NAMES` names and count the others."""
    suffix = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + suffix
