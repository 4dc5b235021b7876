"""Find operations that would make the host wait for an accelerator, without an accelerator.

    with accelerated(monkeypatch) as device:                # "meta": its tensors stand for those of an accelerator
        actor = ...                                         # built on that device
        with HostWaits() as waits:
            actor.update_actor(batch)
    assert not waits.operations, waits.operations                  # ["aten._local_scalar_dense at engine/optim.py:185"]

Tensors on "meta" have shapes but no values, so every operation that needs a value is detected. A dispatch mode sees
each operator, including those of the backward pass. It answers an operation that needs values with ones and continues.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "meta"
ROOT = Path(__file__).parents[2] / "camshaft"

MAKERS = ("tensor", "as_tensor", "asarray", "new_tensor")
"""Functions that fill a host tensor and copy it, below the level of a dispatch mode."""

READS_NUMBERS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::allclose",
        "aten::bincount",
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::_unique",
        "aten::_unique2",
    }
)
"""Operators whose result or size the host needs before it can continue."""

_pinned: list[Tensor] = []
"""Kept alive with the patches, so that no other storage gets the number of one of them."""


@contextmanager
def accelerated(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Build engines on "meta", whose tensors report a CUDA device; host memory can be pinned.

    If Triton is installed, they take the path of its kernels, whose launches have no effect.
    """

    def pin_memory(tensor: Tensor) -> Tensor:
        _pinned.append(tensor.clone())
        return _pinned[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == DEVICE), raising=False)
        patch.setattr(torch.Tensor, "pin_memory", pin_memory)
        patch.setattr("camshaft.device.can_pin_memory", lambda device: device.type == DEVICE)
        patch.setattr("camshaft.engine.torch_engine.resolve_device", lambda _: torch.device(DEVICE))
        if importlib.util.find_spec("triton") is not None:
            patch.setattr("camshaft.models.triton.linear_logprob._launch", lambda *_args, **_constants: None)
        yield DEVICE
    _pinned.clear()


class HostWaits(TorchDispatchMode):
    """Record waits in `operations` and the names of all operators in `operators`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.operators: set[str] = set()
        self._makers = _Makers(self.operations)

    def __enter__(self) -> Any:
        self._makers.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._makers.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = func._schema.name
        self.operators.add(f"{name}.{func._overloadname}")
        if not _waits(name, args, options):
            return func(*args, **options)
        self.operations.append(f"{name} at {_place()}")
        return _answer(name, func, args, options)


class _Makers(TorchFunctionMode):
    """Detect tensors that are made on the device from Python numbers."""

    def __init__(self, operations: list[str]):
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in MAKERS:
            device = args[0].device if name == "new_tensor" else "cpu"
            # An existing tensor is copied as usual, which the dispatch mode sees.
            if _there(options.get("device") or device) and not isinstance(args[name == "new_tensor"], Tensor):
                self.operations.append(f"torch.{name} at {_place()}")
        return func(*args, **options)


def _waits(name: str, args: Any, options: dict[str, Any]) -> bool:
    tensors = [x for x in args if isinstance(x, Tensor)]
    if name == "aten::_to_copy":
        target = options.get("device")
        return target is not None and _copy_waits(args[0], _there(target), bool(options.get("non_blocking")))
    if name == "aten::copy_":
        not_waiting = bool(options.get("non_blocking", args[2] if len(args) > 2 else False))
        return _copy_waits(args[1], _there(args[0].device), not_waiting) and bool(
            args[1].ndim or _there(args[1].device)
        )
    if not any(_there(x.device) for x in tensors):
        return False
    if name == "aten::repeat_interleave":
        return options.get("output_size") is None
    if name == "aten::segment_reduce":
        return not options.get("unsafe")
    if name.startswith("aten::index") and isinstance(
        args[1], (list, tuple)
    ):  # counting a mask, or copying a host index
        return any(x is not None and (x.dtype in (torch.bool, torch.uint8) or not _there(x.device)) for x in args[1])
    return name in READS_NUMBERS


def _copy_waits(source: Tensor, to_device: bool, not_waiting: bool) -> bool:
    if _there(source.device) == to_device or not source.numel():
        return False
    host_is_pinned = not to_device or any(_same_storage(source, pinned) for pinned in _pinned)
    return not (not_waiting and host_is_pinned)


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _there(device: torch.device | str) -> bool:
    return torch.device(device).type == DEVICE


def _answer(name: str, func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Return a substitute result; raise an error if none is possible."""
    if name == "aten::_local_scalar_dense":
        return torch.ones((), dtype=args[0].dtype).item()
    if name == "aten::_to_copy" and not _there(options["device"]):
        return torch.ones(args[0].shape, dtype=options.get("dtype") or args[0].dtype)
    if name == "aten::copy_" and not _there(args[0].device):
        return args[0].fill_(1)
    if name == "aten::equal":
        return True
    return func(*args, **options)


def _place() -> str:
    """Return the innermost line of the package outside the function that all copies to a device use."""
    frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(ROOT) and f.name != "to_device"]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "a test"


def inside(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> tuple[list[int], HostWaits]:
    """Record the waits inside each call of a method; return (a number for each call, all waits)."""
    waits, calls = HostWaits(), list[int]()
    original: Callable[..., Any] = getattr(owner, method)

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        before = len(waits.operations)
        with waits:
            result = original(self, *args, **options)
        calls.append(len(waits.operations) - before)
        return result

    monkeypatch.setattr(owner, method, watched)
    return calls, waits
