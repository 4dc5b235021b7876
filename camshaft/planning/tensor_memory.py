"""Counts the bytes of live tensors, and runs code without computing it.

    with TensorMemory() as memory:                      # on real ranks: measure
        role.update_actor(batch)
    with TensorMemory(computes=False) as memory:        # on one rank of a fake process group: forecast
        role.update_actor(batch)
    memory.live, memory.peak                            # bytes

Both count the storages of tensors in host memory as operators create them and as they are freed, so a forecast follows
the code that a run executes. Memory that a kernel allocates and frees inside an operator is not counted, nor are the
buffers of communication libraries. FSDP frees and reallocates gathered weights by resizing their storage, which no
operator reports, so the sizes of such storages are read again at each operator.

With `computes=False`, operators on floating-point tensors return tensors of the right size whose memory is never
written, so the operating system commits no memory for them. Operators on integer tensors, such as tokens and masks, and
on few elements are computed, because the sizes of other tensors depend on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

SMALL = 1024
"""Operators on at most this number of elements are computed. They include counts and norms."""
PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors that operators run on. Other classes call operators on these."""
FILLS = frozenset({"aten::zeros", "aten::ones", "aten::rand", "aten::randn", "aten::new_zeros"})
"""Operators that write a new tensor and read none."""
COMMUNICATION = frozenset({"c10d", "_c10d_functional", "fsdp"})
"""Namespaces of operators that run in a forecast too. Those of a fake process group do nothing or copy."""


class TensorMemory(TorchDispatchMode):
    """Bytes of the tensors that operators in this context create."""

    def __init__(self, computes: bool = True):
        super().__init__()
        self.computes = computes
        self.live = 0
        """Bytes of live tensors."""
        self.peak = 0
        """Maximum of `live` since the last call of `reset_peak`."""
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._resized: set[int] = set()

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        self._measure(self._storages)
        self.peak = self.live

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were created outside of this context or in another thread."""
        for tensor in tensors:
            self._watch(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(cls.__name__ == "FakeTensor" for cls in types) or _fake_mode_is_active():
            return func(*args, **kwargs)  # DTensor computes shapes with fake tensors
        if any(issubclass(cls, Tensor) and cls not in PLAIN for cls in types):
            return NotImplemented  # a DTensor calls the operator on its local tensor, which comes here again
        self._measure(self._resized)
        result = func(*args, **kwargs) if self.computes or func.is_view else _skip(func, args, kwargs)
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._watch(value)
        return result

    def _watch(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        self._storages[key] = (weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes())
        self.live += storage.nbytes()
        if self.live > self.peak:
            self._measure(self._storages)

    def _forget(self, key: int) -> None:
        self.live -= self._storages.pop(key)[1]
        self._resized.discard(key)

    def _measure(self, keys: Iterable[int]) -> None:
        """Read the sizes of some storages again, and update the peak."""
        for key in list(keys):
            reference, size = self._storages[key]
            storage = reference()
            if storage is not None and (new_size := storage.nbytes()) != size:
                self._storages[key] = (reference, new_size)
                self._resized.add(key)
                self.live += new_size - size
        self.peak = max(self.peak, self.live)


def _fake_mode_is_active() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _skip(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the results of an operator without computing large floating-point results."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    device = kwargs.get("device") or (tensors[0].device if tensors else torch.get_default_device())
    if torch.device(device).type == "meta" or func.namespace in COMMUNICATION or not _is_large(func, tensors, kwargs):
        return func(*args, **kwargs)
    written = _written_arguments(func, args, kwargs)
    if written is not None:
        return written[0] if len(func._schema.returns) == 1 else tuple(written) or None
    try:
        result = func(*tree_map(_to_meta, tuple(args)), **tree_map(_to_meta, dict(kwargs)))
    except NotImplementedError:  # the operator has no shape function
        return func(*args, **kwargs)
    return tree_map(_allocate, result)


def _is_large(func: Any, tensors: Sequence[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Return True for operators on many floating-point numbers."""
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
