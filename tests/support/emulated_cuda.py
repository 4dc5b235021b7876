"""A CUDA device that is emulated in host memory, on which the code path of CUDA computes real numbers.

    with emulated_cuda() as device:
        engine = build_engine(device=DEVICE)       # tensors of this device report that they are on CUDA
    device.waits                                   # operators for which the host would wait, with their place
    device.launches                                # number of kernel launches, by operator

Each tensor of the device wraps a tensor in host memory, on which the operators run. An operator raises an error if it
gets tensors of both devices where CUDA would. Kernels that do not exist on a CPU are replaced: flash attention by plain
attention, products of half precision with float32 results by float32 products, and Triton kernels by their
interpretation if TRITON_INTERPRET=1 is set. Without it, the device has no Triton. A copy to the host with
`non_blocking` arrives when the host waits for the device; until then, its tensor contains NaN or -1.

The emulation does not show speed, the rounding of GPU kernels, streams, races, or memory use. It is one thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import camshaft
from camshaft.models import flash
from support.interpreter import fixed_dot

DEVICE = "emulated"
ROOT = Path(camshaft.__file__).parent
GIB = 2**30

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
NO_KERNEL = ALLOCATIONS | {"_local_scalar_dense", "_unsafe_view", "is_pinned", "lift_fresh", "detach", "is_same_size"}
"""Operators, besides views, that launch no kernel."""

READS_VALUES = {
    "_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_dim", "_unique2", "bincount", "is_nonzero",
    "unique_consecutive", "_unique", "allclose",
}  # fmt: skip
"""Operators whose result or size the host reads."""

COPIES = {"copy_", "_to_copy", "set_", "is_pinned", "_pin_memory"}
INDEXED = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}


class DeviceMismatchError(RuntimeError):
    """An operator that got tensors of the host and of the device."""


class EmulatedTensor(Tensor):
    """A tensor of the device. `host` holds its numbers."""

    host: Tensor
    __slots__ = ()
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    is_cuda = property(lambda _: True)  # pyright: ignore

    @staticmethod
    def __new__(cls, host: Tensor) -> EmulatedTensor:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=torch.device(DEVICE, 0),
            requires_grad=False,
        )
        made.host = host.detach() if host.requires_grad else host
        return made

    def __repr__(self, **_: Any) -> str:
        return f"EmulatedTensor({self.host!r})"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def storage(self) -> Any:
        return self.host.storage()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return EMULATOR.run(func, args, kwargs or {})


class Emulator(TorchDispatchMode):
    """Runs the operators of the device, and counts launches and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.synchronizations = 0
        """Number of times that the host has waited for all work of the device."""
        self.free_memory = 16 * GIB
        """Free bytes that the device reports."""
        self._arriving: list[tuple[Tensor, Tensor]] = []
        """Host tensors of asynchronous copies, and their values."""

    def reset(self) -> None:
        """Forget all counts."""
        self.waits.clear()
        self.launches.clear()
        self.synchronizations = 0

    def synchronize(self, *_: Any) -> None:
        """Wait for all work of the device."""
        self.synchronizations += 1
        self._arrive()

    def _arrive(self) -> None:
        """Complete the copies to the host, which the device executes before any later work."""
        with torch.no_grad(), _disable_current_modes():
            for tensor, value in self._arriving:
                tensor.copy_(value)
        self._arriving.clear()

    def _delay(self, tensor: Tensor) -> None:
        """Hide the values of a host tensor until they arrive."""
        with torch.no_grad(), _disable_current_modes():
            self._arriving.append((tensor, tensor.clone()))
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator on the host if no tensor is on the device, and otherwise on the memory of its tensors."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if isinstance(tensor, EmulatedTensor)]
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if not on_device and target != DEVICE:
            return func(*args, **kwargs)
        if func not in KERNELS and _is_composite(func):
            with self:  # inference mode leaves composite operators whole
                return func.decompose(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        self._check_devices(name, args, tensors, on_device)
        waits = self.waits.total()
        self._count(func, name, args, kwargs, target)
        if self.waits.total() > waits or target == DEVICE:
            self._arrive()
        with torch.no_grad(), _disable_current_modes():
            result = _run_on_host(func, name, args, kwargs)
        if name == "copy_":
            return args[0]
        if target is not None and target != DEVICE:
            if name == "_to_copy" and kwargs.get("non_blocking"):  # into pinned memory, which torch allocates
                self._delay(result)
            return result
        result = pytree.tree_map_only(
            Tensor, lambda t: t if isinstance(t, EmulatedTensor) else EmulatedTensor(t), result
        )
        return result if func in KERNELS else _written_argument(func, args, kwargs, result)

    def _check_devices(self, name: str, args: Any, tensors: list[Tensor], on_device: list[Any]) -> None:
        on_host = [t for t in tensors if not isinstance(t, EmulatedTensor) and t.device.type != "meta"]
        if not on_host or not on_device or name in COPIES:
            return
        if name in INDEXED and isinstance(args[0], EmulatedTensor):
            self.waits[f"{name} with an index of the host at {_place()}"] += 1
        elif name in INDEXED or any(tensor.ndim for tensor in on_host):  # a scalar of the host may take part
            shapes = [tuple(t.shape) for t in on_host], [tuple(t.shape) for t in on_device]
            raise DeviceMismatchError(f"{name} got tensors of the host {shapes[0]} and of the device {shapes[1]}")

    def _count(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], target: str | None) -> None:
        if name in READS_VALUES:
            self.waits[f"{name} at {_place()}"] += 1
        elif name == "_to_copy" and target is not None:
            self._count_copy(args[0], target == DEVICE, kwargs.get("non_blocking"), pins=True)
        elif name == "copy_":
            self._count_copy(
                args[1], isinstance(args[0], EmulatedTensor), kwargs.get("non_blocking") or args[2:] == (True,)
            )
        if name not in NO_KERNEL and not func.is_view:
            self.launches[name] += 1

    def _count_copy(self, source: Tensor, to_device: bool, non_blocking: Any, pins: bool = False) -> None:
        crosses = isinstance(source, EmulatedTensor) != to_device
        if crosses and source.numel() and not (non_blocking and (to_device or pins)):
            self.waits[f"copy {'to' if to_device else 'from'} the device at {_place()}"] += 1


def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _run_on_host(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(EmulatedTensor, lambda tensor: tensor.host, (args, dict(kwargs)))
    kwargs.pop("pin_memory", None)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
        if name == "_to_copy" and args[0].dtype == (kwargs.get("dtype") or args[0].dtype):
            return args[0].clone(memory_format=torch.preserve_format)
    return (KERNELS.get(func) or func)(*args, **kwargs)


def _written_argument(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """Return the argument that an in-place operator has written to, or else the result."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(result, Tensor):
            continue
        given = args[number] if number < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        if isinstance(given, EmulatedTensor) and given.shape != given.host.shape:  # an operator like squeeze_
            host = given.host
            DATA.__set__(given, EmulatedTensor(host))
            given.host = host
        if isinstance(given, Tensor):
            return given
    return result


def _place() -> str:
    """Return the innermost line of the package outside the function that all copies to a device use."""
    frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(ROOT) and f.name != "to_device"]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "a test"


# -- kernels that a CPU does not have -------------------------------------------------------------


def _hidden(queries: int, keys: int, window: int | None, causal: bool) -> Tensor:
    """Return a mask of the keys that each query does not see."""
    if not causal:
        return torch.zeros(queries, keys, dtype=torch.bool)
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    hidden = distance < 0
    return hidden if window is None else hidden | (distance > window)


def _groups(bounds: Any, queries: list[Tensor], keys: list[Tensor]) -> Iterator[tuple[slice, slice, list[Tensor]]]:
    """Yield the spans of each group of queries and keys, and its tensors (H, L, D) in float32, with repeated heads."""
    for (start, stop), (first, last) in zip(*(itertools.pairwise(edges.tolist()) for edges in bounds), strict=True):
        parts = [x[start:stop] for x in queries] + [x[first:last] for x in keys]
        parts = [part.transpose(0, 1).float() for part in parts]
        yield slice(start, stop), slice(first, last), [p.repeat_interleave(len(parts[0]) // len(p), 0) for p in parts]


def _flash_attention(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout: float,
    causal: bool, mask: bool, *, scale: float | None = None, window_size_left: int | None = None, **_options: Any,
) -> Any:  # fmt: skip
    assert query.dtype in (torch.bfloat16, torch.float16), "flash attention supports half precision only"
    assert query.shape[-1] <= 256, "flash attention supports head sizes up to 256"
    assert cu_q.dtype == cu_k.dtype == torch.int32, "flash attention requires int32 bounds"
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    for longest, bounds, tensor in ((max_q, cu_q, query), (max_k, cu_k, key)):
        assert longest == bounds.diff().max(), "flash attention requires the length of the longest group"
        assert bounds[-1] == len(tensor), "the groups must cover all tokens"
    out, log_sums = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])
    for span, _, (q, k, v) in _groups((cu_q, cu_k), [query], [key, value]):
        scores = q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
        scores = scores.masked_fill(_hidden(q.shape[1], k.shape[1], window_size_left, causal), -torch.inf)
        log_sums[:, span] = scores.logsumexp(-1)
        out[span] = (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
    return out, log_sums, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _flash_attention_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, log_sums: Any, cu_q: Any, cu_k: Any, max_q: int,
    max_k: int, dropout: float, causal: bool, rng: Any, unused: Any, *, scale: float | None = None,
    window_size_left: int | None = None, **_options: Any,
) -> Any:  # fmt: skip
    """Compute the gradients by hand, because there is no autograd below an operator."""
    gradients = [torch.zeros(tensor.shape) for tensor in (query, key, value)]
    factor: float = scale or query.shape[-1] ** -0.5
    for span, other, (q, o, g, k, v) in _groups((cu_q, cu_k), [query, out, grad], [key, value]):
        hidden = _hidden(q.shape[1], k.shape[1], window_size_left, causal)
        p = (q @ k.transpose(1, 2) * factor - log_sums[:, span, None]).exp().masked_fill(hidden, 0)
        ds = p * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * factor
        parts = ((span, ds @ k), (other, ds.transpose(1, 2) @ q), (other, p.transpose(1, 2) @ g))
        for total, (rows, part) in zip(gradients, parts, strict=True):
            total[rows] = part.unflatten(0, (total.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(total.to(tensor.dtype) for total, tensor in zip(gradients, (query, key, value), strict=True))


def _mm_to_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    assert {a.dtype, b.dtype} in ({torch.bfloat16}, {torch.float16}), "mm(out_dtype=) requires half precision"
    return (a.float() @ b.float()).to(dtype)


KERNELS: dict[Any, Callable[..., Any]] = {}
EMULATOR = Emulator()


def _launch_triton(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
    """Interpret a Triton kernel on the memory of its tensors."""
    EMULATOR.launches[f"triton.{kernel.fn.__name__}"] += 1
    on_host = [tuple(x.shape) for x in args if isinstance(x, Tensor) and not isinstance(x, EmulatedTensor)]
    if on_host:
        raise DeviceMismatchError(f"a Triton kernel got tensors of the host: {on_host}")
    with torch.no_grad(), _disable_current_modes():
        kernel[grid](*(x.host if isinstance(x, EmulatedTensor) else x for x in args), **options)


# -- the device -----------------------------------------------------------------------------------


class _DeviceModule:
    """The module of the device, `torch.get_device_module(DEVICE)`. Functions that it does not define return 0."""

    CUDAGraph = object
    active = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_options: 0

    def is_available(self) -> bool:
        return self.active

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return int(self.active)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def get_device_properties(self, *_: Any) -> Any:
        return SimpleNamespace(multi_processor_count=4, name=DEVICE, total_memory=16 * GIB, uuid="GPU-0")

    def device(self, *_: Any) -> Any:
        return contextlib.nullcontext()

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return EMULATOR.free_memory, 16 * GIB


MODULE = _DeviceModule()
DATA: Any = torch._C.TensorBase.data


_is_compatible: Any = torch._VF._has_compatible_shallow_copy_type


def _keeps_object(tensor: Tensor, new: Tensor) -> bool:
    """Return True if `Module.to` sets the data of the tensor: on CUDA, for parameters."""
    return isinstance(tensor, nn.Parameter) or _is_compatible(tensor, new)


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """Set `tensor.data`. Between devices, the object gets the contents of a new tensor, as `Module.to` does on CUDA."""
    if isinstance(value, EmulatedTensor) == isinstance(tensor, EmulatedTensor):
        DATA.__set__(tensor, value)
        if isinstance(value, EmulatedTensor):
            tensor.host = value.host  # pyright: ignore[reportAttributeAccessIssue]
        return
    tensor.grad = None  # a tensor with a gradient cannot be swapped; `Module.to` sets the gradient again
    new = value.detach()
    torch.utils.swap_tensors(
        tensor, nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    )


class RepeatedCalls:
    """Stands for a CUDA graph: a replay calls the function again. A wait during a capture is an error."""

    def __init__(self, _device: Any):
        pass

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        waits = EMULATOR.waits.copy()
        function()
        if EMULATOR.waits != waits:
            raise RuntimeError(f"operation not permitted when stream is capturing: {EMULATOR.waits - waits}")
        return function

    def release(self) -> None: ...


def _register() -> None:
    """Register the device with torch, once per process."""
    if not KERNELS:
        import torch._dynamo  # before its functions are patched, because it checks them while it is imported
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(DEVICE, backend_module=MODULE)
        KERNELS[torch.ops.aten.mm.dtype] = _mm_to_dtype
        KERNELS[flash.KERNEL] = _flash_attention
        KERNELS[flash.BACKWARD] = _flash_attention_backward
        # In inference mode, a GPU has one kernel for masked attention.
        KERNELS[torch.ops.aten.scaled_dot_product_attention.default] = torch.nn.functional.scaled_dot_product_attention


def _patches() -> Iterator[Any]:
    accelerator: dict[str, Any] = {
        "current_accelerator": lambda check_available=False: torch.device(DEVICE),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "set_device_index": lambda *_: None,
        "synchronize": EMULATOR.synchronize,
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "empty_cache": lambda: None,
    }
    for name, value in accelerator.items():
        yield mock.patch.object(torch.accelerator, name, value)
    yield mock.patch.object(MODULE, "active", True)
    yield mock.patch.object(Tensor, "pin_memory", lambda self, *_: self.clone())
    yield mock.patch.object(torch, "_has_compatible_shallow_copy_type", _keeps_object)
    yield mock.patch.object(Tensor, "data", property(lambda tensor: DATA.__get__(tensor), _set_data), create=True)
    yield mock.patch("camshaft.rollout.builtin.cuda.graphs.CUDAGraphCapture", RepeatedCalls)
    if os.environ.get("TRITON_INTERPRET") != "1":
        for reader in (
            "digest.checksums",
            "models.linear_logprob",
            "rollout.builtin.cuda.graphs",
            "rollout.builtin.scheduler",
        ):
            yield mock.patch(f"camshaft.{reader}.supports_triton", return_value=False)
        return
    from camshaft.digest import kernel as digest_kernel
    from camshaft.models.triton import linear_logprob
    from camshaft.rollout.builtin.cuda import fused_kernels, kernels, sampling

    def launch_on_tile(kernel: Any, grid: Any, logits: Tensor, *rest: Any, **constants: Any) -> None:
        block = linear_logprob._block(logits.shape[1])
        _launch_triton(kernel, grid, logits, *rest, **constants, BLOCK=block, num_warps=linear_logprob.WARPS)

    yield fixed_dot()
    yield mock.patch.object(digest_kernel, "_launch", _launch_triton)
    for module in (kernels, fused_kernels, sampling):
        yield mock.patch.object(module, "launch", _launch_triton)
    yield mock.patch.object(linear_logprob, "_launch", launch_on_tile)


@contextlib.contextmanager
def emulated_cuda() -> Iterator[Emulator]:
    """Make the device available inside the block."""
    _register()
    lifts_cpu_tensors_only = torch._C._only_lift_cpu_tensors()
    with contextlib.ExitStack() as stack:
        for patch in _patches():
            stack.enter_context(patch)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts_cpu_tensors_only)
        EMULATOR.reset()
        stack.callback(EMULATOR._arrive)
        with EMULATOR:
            yield EMULATOR
