"""A CPU stand-in for CUDA graphs. A replay freezes the same values that a CUDA graph freezes.

    recorder = OperatorCapture()
    replay = recorder.capture(function)
    replay()

A capture records each torch operator of a function with its tensors and Python values. A replay runs the same
operators on the same tensors and writes the results to the memory of the first results. Python values, and tensors
that have been replaced since, therefore keep their state at capture. A capture raises an error if the function reads a
tensor's values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from camshaft.rollout.builtin.cuda.graphs import CUDAGraphCapture

Operator = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]

HOST_SYNCS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "lift_fresh",
)
"""Operators that make the host wait for a GPU or copy from it: value-dependent branches and sizes, constants."""


class OperatorCapture(CUDAGraphCapture):
    """Capture and replay with the interface of a CUDA graph; see the module docstring."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.count = 0
        """Number of captures."""
        self.released = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.count += 1
        operators: list[Operator] = []
        with _Recording(operators):
            function()

        def replay() -> None:
            for operator, args, kwargs, first in operators:
                for old, new in zip(tensors(first), tensors(operator(*args, **kwargs)), strict=True):
                    if new.data_ptr() != old.data_ptr():  # otherwise a view, or written in place
                        old.copy_(new)

        return replay

    def release(self) -> None:
        self.released += 1


class TouchedDevices(TorchDispatchMode):
    """Record in `devices` the types of the devices on which operators read or write tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.devices |= {tensor.device.type for tensor in tensors((args, kwargs, result))}
        return result


class _Recording(TorchDispatchMode):
    def __init__(self, operators: list[Operator]):
        super().__init__()
        self.operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in HOST_SYNCS or "repeat_interleave.Tensor" in str(func):
            raise RuntimeError(f"{name} is not permitted while a step is recorded")
        result = func(*args, **(kwargs or {}))
        self.operators.append((func, args, kwargs or {}, result))
        return result


def tensors(results: Any) -> list[Tensor]:
    """Return the tensors in the result of an operator."""
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
