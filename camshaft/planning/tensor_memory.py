"""Counts the bytes of live tensors, and runs code without computing it.

    with TensorMemory() as memory:                      # on real ranks: measure
        role.update_actor(batch)
    with TensorMemory(computes=False) as memory:        # on one rank of a fake process group: forecast
        role.update_actor(batch)
    memory.live, memory.peak                            # bytes

Both count the storages of tensors in host memory as operators create them and as they are freed, so a forecast follows
the code that a run executes. Memory that a kernel allocates and frees inside an operator is not counted, nor are the
buffers of communication libraries. FSDP frees and reallocates gathered weights by resizing their storage, which no
operator reports. The size of a storage is therefore read again when an operator fills it, and the sizes of all filled
storages when the peak may rise. (`MemTracker` of torch replaces `torch.UntypedStorage.resize_` instead.)

With `computes=False`, operators on floating-point tensors return tensors of the right size whose memory is never
written, so the operating system commits no memory for them. Operators on integer tensors, such as tokens and masks, and
on few elements are computed, because the sizes of other tensors depend on them. Collectives do not communicate.

A forecast for a device holds the tensors of the device in host memory, too. `live` and `peak` count those of the
device. Tensors that a run would hold in host memory are created in pinned memory or inside `on_host`, or are passed to
`place`; `host_live` and the `host_peak` of parts count them.

`mark` splits the peak of a phase into the peaks of its parts, from which `planning/layers.py` extrapolates.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

SMALL = 1024
"""Operators on at most this number of elements are computed. They include counts and norms."""
PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors that operators run on. Other classes call operators on these."""
FILLS = frozenset({"aten::zeros", "aten::ones", "aten::rand", "aten::randn", "aten::new_zeros"})
"""Operators that write a new tensor and read none."""
ALIASES = frozenset({"aten::_unsafe_view", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"})
"""Operators that return memory of their argument, but are not marked as views."""
DEVICE_ONLY = frozenset({"aten::mm.dtype", "aten::_flash_attention_forward", "aten::_flash_attention_backward"})
"""Operators that a CPU does not have."""
PACKED: Any = torch._mkldnn  # pyright: ignore[reportAttributeAccessIssue]
"""Layout of the packed weights of oneDNN and MKL, which have no storage."""

_active: ContextVar["TensorMemory"] = ContextVar("memory of the forecast")


def active_memory() -> "TensorMemory":
    """Return the memory whose context is active."""
    return _active.get()


Label = tuple[str, int]
"""Direction of a pass through a layer, and the index of the layer."""


class Part(NamedTuple):
    """The peaks of a part of a phase, in bytes."""

    label: Label | None
    peak: int
    host_peak: int


class _Entry:
    """A live storage, or a live packed weight."""

    __slots__ = ("on_host", "reference", "size")

    def __init__(self, reference: weakref.ref[torch.UntypedStorage | Tensor], size: int, on_host: bool):
        self.reference, self.size, self.on_host = reference, size, on_host


class TensorMemory(TorchDispatchMode):
    """Bytes of the tensors that operators in this context create."""

    def __init__(self, computes: bool = True):
        super().__init__()
        self.computes = computes
        self.live = self.host_live = 0
        """Bytes of live tensors."""
        self.parts: list[Part] = []
        """The parts since the last call of `reset_peak`."""
        self.gradients_on_host = False
        """True if reduced gradients are created in host memory, as the offload policy of FSDP does."""
        self._peak = self._host_peak = 0
        self._label: Label | None = None
        self._on_host = False
        self._entries: dict[int, _Entry] = {}
        self._filled: set[int] = set()
        """Keys of storages that an operator has filled. A storage whose size becomes 0 is removed."""
        self._results: dict[Any, Any] = {}

    def __enter__(self) -> Self:
        self._token = _active.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.reset(self._token)

    # -- peaks ------------------------------------------------------------------------------------

    @property
    def peak(self) -> int:
        """Maximum of `live` since the last call of `reset_peak`."""
        return max(self._peak, *(part.peak for part in self.parts), 0)

    def reset_peak(self) -> None:
        """Forget earlier peaks and parts."""
        self._measure(self._filled)
        self.parts.clear()
        self._label, self._peak, self._host_peak = None, self.live, self.host_live

    def mark(self, label: Label | None) -> None:
        """End a part, and start the next one with this label."""
        self._measure(self._filled)
        self.parts.append(Part(self._label, self._peak, self._host_peak))
        self._label, self._peak, self._host_peak = label, self.live, self.host_live

    # -- places -----------------------------------------------------------------------------------

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were created outside of this context."""
        for tensor in tensors:
            self._watch(_local(tensor))

    def place(self, tensors: Iterable[Tensor], on_host: bool) -> None:
        """Count tensors as tensors in host memory or on the device from now on."""
        for tensor in tensors:
            entry = self._watch(_local(tensor))
            if entry is not None and entry.on_host != on_host:
                self._add(entry, -entry.size)
                entry.on_host = on_host
                self._add(entry, entry.size)
        self._update_peak()

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count new tensors as tensors in host memory."""
        before, self._on_host = self._on_host, True
        try:
            yield
        finally:
            self._on_host = before

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute all operators, also in a forecast."""
        before, self.computes = self.computes, True
        try:
            yield
        finally:
            self.computes = before

    # -- operators --------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(cls.__name__ == "FakeTensor" for cls in types) or _fake_mode_is_active():
            return func(*args, **kwargs)  # DTensor computes shapes with fake tensors
        if any(issubclass(cls, Tensor) and cls not in PLAIN for cls in types):
            return NotImplemented  # a DTensor calls the operator on its local tensor, which comes here again
        if "out" in kwargs or func._schema.name == "aten::copy_":
            self._fill(_tensors(kwargs.get("out", args[:1])))
        result = func(*args, **kwargs) if self.computes or func.is_view else self._skip(func, args, kwargs)
        for value in _tensors(result):
            if type(value) in PLAIN:  # the tensor inside of another class has been counted
                self._watch(value)
        return result

    def _skip(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the results of an operator without computing large floating-point results."""
        name, special = func._schema.name, SPECIAL.get(func._schema.name)
        if special is not None:
            return special(self, args, kwargs)
        if kwargs.get("pin_memory"):
            with self.on_host():
                result = self._skip(func, args, {**kwargs, "pin_memory": False})
                self.watch(_tensors(result))
                return result
        tensors = list(_tensors((args, kwargs)))
        if func.namespace == "c10d":
            return _communicate(self, func, args, kwargs, tensors)
        device = kwargs.get("device") or (tensors[0].device if tensors else torch.get_default_device())
        if torch.device(device).type == "meta" or name in ALIASES:
            return func(*args, **kwargs)
        if not _is_large(func, tensors, kwargs):
            result = func(*args, **kwargs)
            if func.namespace == "_c10d_functional":  # torch warns at exit of collectives without a wait
                tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, result)
            return result
        written = _written_arguments(func, args, kwargs)
        if written is not None:
            return written[0] if len(func._schema.returns) == 1 else tuple(written) or None
        result = self._result(func, args, kwargs)
        return func(*args, **kwargs) if result is None else tree_map(_allocate, result)

    def _result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the results of an operator on the meta device; None if it has no shape function."""
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        key = (func, spec, *map(_key, leaves))
        if key not in self._results:
            try:
                self._results[key] = (func(*tree_map(_to_meta, tuple(args)), **tree_map(_to_meta, dict(kwargs))),)
            except NotImplementedError:
                self._results[key] = (None,)
        return self._results[key][0]

    # -- storages ---------------------------------------------------------------------------------

    def _watch(self, tensor: Tensor) -> _Entry | None:
        """Count the storage of a tensor until it is freed."""
        if tensor.device.type != "cpu" or tensor.layout not in (torch.strided, PACKED):
            return None
        storage: Any = tensor.untyped_storage() if tensor.layout is torch.strided else tensor
        key = storage._cdata
        entry = self._entries.get(key)
        if entry is None:
            reference = weakref.ref(storage, lambda _: self._forget(key))
            entry = self._entries[key] = _Entry(reference, _num_bytes(storage), self._on_host)
            self._add(entry, entry.size)
            self._update_peak()
        return entry

    def _fill(self, tensors: Iterable[Tensor]) -> None:
        """Count the present sizes of the storages that an operator fills."""
        strided = (tensor for tensor in tensors if tensor.layout is torch.strided)
        keys = {tensor.untyped_storage()._cdata for tensor in strided if self._watch(tensor) is not None}
        self._filled |= keys
        self._measure(keys)
        self._update_peak()

    def _forget(self, key: int) -> None:
        entry = self._entries.pop(key)
        self._add(entry, -entry.size)
        self._filled.discard(key)

    def _measure(self, keys: Iterable[int]) -> None:
        """Read the sizes of some storages again."""
        for key in list(keys):
            entry = self._entries.get(key)  # None if another thread has freed the storage meanwhile
            storage = entry.reference() if entry else None
            if entry and storage is not None and (size := _num_bytes(storage)) != entry.size:
                self._add(entry, size - entry.size)
                entry.size = size
                if not size:
                    self._filled.discard(key)

    def _add(self, entry: _Entry, size: int) -> None:
        if entry.on_host:
            self.host_live += size
        else:
            self.live += size

    def _update_peak(self) -> None:
        """Update the peaks, but first count the storages that have been freed without an operator."""
        if self.live > self._peak or self.host_live > self._host_peak:
            self._measure(self._filled)
            self._peak, self._host_peak = max(self._peak, self.live), max(self._host_peak, self.host_live)


def _num_bytes(storage: torch.UntypedStorage | Tensor) -> int:
    return storage.nbytes if isinstance(storage, Tensor) else storage.nbytes()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an operator, faster than torch's `tree_iter`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fake_mode_is_active() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _is_large(func: Any, tensors: Sequence[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Return True for operators on many floating-point numbers, and for those that a CPU does not have."""
    if func.name() in DEVICE_ONLY:
        return True
    if any(tensor.is_floating_point() for tensor in tensors):
        return sum(tensor.numel() for tensor in tensors) > SMALL
    dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
    return func._schema.name in FILLS and dtype.is_floating_point


def _written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Return the results of an operator that only writes to its arguments; None for other operators."""
    schema = func._schema
    if not schema.is_mutable or not all(item.alias_info is not None for item in schema.returns):
        return None
    values = dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | dict(kwargs)
    writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [values[name] for name in writes if name in values][: len(schema.returns)]


def _key(leaf: Any) -> Any:
    """Return what the result of an operator depends on, for an argument."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf), leaf  # 1, 1.0 and True are equal


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _allocate(value: Any) -> Any:
    """Return a tensor in host memory with the shape of a tensor on the meta device. Small tensors are filled."""
    if not isinstance(value, Tensor):
        return value
    result = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    return result.fill_(1) if value.numel() <= SMALL or not value.is_floating_point() else result


# -- operators without a shape function -----------------------------------------------------------


def _communicate(
    memory: TensorMemory, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> Any:
    """Run a collective on few numbers, which copies in a fake group, and skip others."""
    if memory.gradients_on_host and func._schema.name == "c10d::_reduce_scatter_base_":
        memory.place([args[0]], on_host=True)
    if not any(tensor.is_floating_point() and tensor.numel() > SMALL for tensor in tensors):
        return func(*args, **kwargs)
    from torch._C._distributed_c10d import FakeWork

    work = FakeWork().boxed()
    return (args[0], work) if len(func._schema.returns) == 2 else work


def _all_gather_copy_in(_memory: TensorMemory, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    _, output, _, count, rank = args
    return output.narrow(0, count * rank, count), output


def _nothing(_memory: TensorMemory, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
    return None


def _ones(operator: Any, memory: TensorMemory, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return tree_map(lambda result: _allocate(result).fill_(1), memory._result(operator, args, kwargs))


def _pack_for_onednn(_memory: TensorMemory, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    return torch.empty_like(args[0])


def _pack_for_mkl(_memory: TensorMemory, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    return torch.empty(_mkl_size(args[0].shape, args[1]))


@functools.cache
def _mkl_size(shape: torch.Size, rows: int) -> int:
    """Return the number of elements of a weight in MKL's layout, which only MKL knows."""
    return torch.ops.mkl._mkl_reorder_linear_weight(torch.empty(shape), rows).numel()


def _linear(position: int, _memory: TensorMemory, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    """Return a tensor for the product of the first argument and the weight at a position."""
    input, weight = args[0], args[position]
    return _allocate(torch.empty((*input.shape[:-1], len(weight)), dtype=input.dtype, device="meta"))


def _grouped_product(_memory: TensorMemory, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return a tensor for a product of grouped matrices, whose shape function accepts only bfloat16."""
    left, right = args[:2]
    offsets = args[2] if len(args) > 2 else kwargs["offs"]
    groups = () if left.dim() != right.dim() else (len(offsets) if left.dim() == 2 else len(left),)
    return _allocate(torch.empty((*groups, left.shape[-2], right.shape[-1]), dtype=left.dtype, device="meta"))


def _pin_memory(memory: TensorMemory, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> Tensor:
    with memory.on_host():
        result = torch.empty_like(args[0])
        memory.watch([result])
    return result if _is_large(torch.ops.aten.clone.default, args[:1], {}) else result.copy_(args[0])


def _is_pinned(memory: TensorMemory, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> bool:
    entry = memory._watch(args[0])
    return entry is not None and entry.on_host


SPECIAL: dict[str, Callable[[TensorMemory, Sequence[Any], Mapping[str, Any]], Any]] = {
    "fsdp::all_gather_copy_in": _all_gather_copy_in,
    "fsdp::split_with_sizes_copy": _nothing,
    "fsdp::chunk_cat": _nothing,
    "aten::_grouped_mm": _grouped_product,
    "aten::_pin_memory": _pin_memory,
    "aten::is_pinned": _is_pinned,
    # An optimizer step is skipped if the norm of the gradients is not finite.
    "aten::_foreach_norm": functools.partial(_ones, torch.ops.aten._foreach_norm.Scalar),
    "aten::linalg_vector_norm": functools.partial(_ones, torch.ops.aten.linalg_vector_norm.default),
    "mkl::_mkl_reorder_linear_weight": _pack_for_mkl,
    "mkl::_mkl_linear": functools.partial(_linear, 2),
    "mkldnn::_reorder_linear_weight": _pack_for_onednn,
    "mkldnn::_linear_pointwise": functools.partial(_linear, 1),
}
"""Operators that a forecast replaces."""
