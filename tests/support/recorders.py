"""A recorder of steps for the CPU, which freezes what a CUDA graph freezes.

    recorder = OperatorCapture()
    replay = recorder.capture(function)
    replay()

It writes down each operator that a function asks of torch, with the very tensors and Python values that it was given.
A replay runs the same operators on the same tensors, and puts results where the first ones lie. So what a step takes
from Python, or from a tensor that was another one then, is what it was; and a step that looks at values is refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Operator = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]

LOOKS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "lift_fresh")
"""What makes a GPU's host wait, or copies from it: choices and sizes that depend on values, constants."""


class OperatorCapture:
    """See the map above."""

    def __init__(self) -> None:
        self.count = 0
        """Recordings so far."""
        self.released = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.count += 1
        tape: list[Operator] = []
        with _Taped(tape):
            function()

        def replay() -> None:
            for operator, args, kwargs, first in tape:
                for old, new in zip(tensors(first), tensors(operator(*args, **kwargs)), strict=True):
                    if new.data_ptr() != old.data_ptr():  # else a view, or what was written in place
                        old.copy_(new)

        return replay

    def release(self) -> None:
        self.released += 1


class TouchedDevices(TorchDispatchMode):
    """Inside, `found` are the kinds of devices on which operators have read or written a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= {tensor.device.type for tensor in tensors((args, kwargs, result))}
        return result


class _Taped(TorchDispatchMode):
    def __init__(self, tape: list[Operator]):
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in LOOKS or "repeat_interleave.Tensor" in str(func):
            raise RuntimeError(f"{name} is not permitted while a step is recorded")
        result = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}, result))
        return result


def tensors(results: Any) -> list[Tensor]:
    """Of what an operator returns."""
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
