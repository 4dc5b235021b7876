"""Runs Megatron on a CPU, for tests: redirects its requests for CUDA to the CPU.

    with on_device(torch.device("cpu")):        # does nothing for other devices
        model(tokens)

Megatron allocates some tensors on "cuda" or on the current CUDA device. Inside the context these become CPU tensors,
and the functions of torch's CUDA module that Megatron calls refer to the CPU. The context undoes all of this on exit.
"""

# pyright: reportMissingImports=false

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _CudaToCPU(TorchFunctionMode):
    """Replaces CUDA devices in the arguments of torch functions with the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _redirect(kwargs["device"])
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1:  # the distributed optimizer compares the name of the type
            return func(*args).replace("torch.", "torch." + "cuda.")
        return func(*map(_redirect, args), **kwargs)


def _redirect(argument: Any) -> Any:
    """Return the CPU for a CUDA device, and any other argument unchanged."""
    is_cuda = (isinstance(argument, str) and argument.startswith("cuda")) or (
        isinstance(argument, torch.device) and argument.type == "cuda"
    )
    return CPU if is_cuda else argument


def _get_rng_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _do_nothing(*_: Any) -> None:
    pass


def _current_device() -> torch.device:
    return CPU


def _maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.detach().numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


class _Stream:
    """A stream on which work is finished at once."""

    def wait_stream(self, stream: "_Stream") -> None:
        pass

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


_FUNCTIONS: dict[str, Any] = {
    "current_device": _current_device,
    "synchronize": _do_nothing,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": torch.default_generator.manual_seed,
    "Stream": _Stream,
    "current_stream": _Stream,
    "stream": contextlib.nullcontext,
}
"""Replacements of functions of torch's CUDA module."""


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Return the context in which calls of Megatron run on `device`."""
    if device.type != "cpu":
        yield
        return
    with (
        mock.patch.multiple(torch.get_device_module("cuda"), **_FUNCTIONS),
        mock.patch.multiple(random, _get_cuda_rng_state=_get_rng_state, _set_cuda_rng_state=_set_rng_state),
        # The function converts GPU tensors only.
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _maybe_move_tensor_to_cpu),
        # The module warns if the state of the CPU changes while Megatron uses that of the GPU; here they are one.
        mock.patch.object(logging.getLogger(random.__name__), "disabled", True),
        _CudaToCPU(),
    ):
        yield
