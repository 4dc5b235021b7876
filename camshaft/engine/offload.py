"""Offloading of parameters, gradients and optimizer state to host memory between phases.

    parts = Parts(packed, optimizer, device, offloaded=("optimizer",))
    with parts.on_device("model", "optimizer"): ...      # on the device inside; other parts are not moved

Parts are "model", "gradients" and "optimizer". At the end of the outermost block offloaded parts return to host memory,
the others to their previous device. torch requires a gradient on the device of its parameter, so gradients offloaded
without the parameters are held by `Parts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from camshaft.device import release_cache

Part = Literal["model", "gradients", "optimizer"]

HOST = torch.device("cpu")


class Parts:
    """Parameters, gradients and optimizer state of one engine, and their devices."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        offloaded: tuple[Part, ...] = (),
    ):
        self._module, self._optimizer, self._device = module, optimizer, device
        self._offloaded = offloaded
        self._in_use: set[Part] = set()
        self._held_gradients: dict[nn.Parameter, Tensor] = {}
        self._restore(dict.fromkeys(self._offloaded))

    @contextlib.contextmanager
    def on_device(self, *parts: Part) -> Iterator[None]:
        """Move the parts to the device on which the engine computes; move them back on exit."""
        unused: list[Part] = [part for part in parts if part not in self._in_use]
        before: dict[Part, torch.device | None] = {part: self.device_of(part) for part in unused}
        self._in_use.update(unused)
        try:
            for part, device in before.items():
                if device is not None and device.type != self._device.type:
                    self.move(part, self._device)
            yield
        finally:
            self._in_use.difference_update(unused)
            self._restore(before)

    def _restore(self, before: Mapping[Part, torch.device | None]) -> None:
        """Move each part to host memory if it is offloaded, else to its previous device."""
        for part, device in before.items():
            target = HOST if part in self._offloaded else device
            current = self.device_of(part)
            if target is not None and current is not None and current.type != target.type:
                self.move(part, target)

    def device_of(self, part: Part) -> torch.device | None:
        """Return the device of a part; None if it has no tensors."""
        if part == "model":
            return next(self._module.parameters()).device
        if part == "gradients":
            attached = (p.grad for p in self._module.parameters() if p.grad is not None)
            return next((gradient.device for gradient in self._held_gradients.values() or attached), None)
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        tensors = (value for state in states for name, value in state.items() if _moves(name, value))
        return next((tensor.device for tensor in tensors), None)

    def move(self, part: Part, device: torch.device) -> None:
        """Move a part to `device`. Parameters move together with their gradients."""
        if part == "model":
            self._module.to(device)
        elif part == "gradients":
            self._move_gradients(device)
        elif self._optimizer is not None:
            for state in self._optimizer.state.values():
                state.update({n: v.to(device) for n, v in state.items() if _moves(n, v)})
        if device.type != self._device.type:
            release_cache(self._device)

    def clear_gradients(self) -> None:
        """Clear all gradients, offloaded ones too."""
        self._held_gradients.clear()
        self._module.zero_grad(set_to_none=True)

    def _move_gradients(self, device: torch.device) -> None:
        for parameter in self._module.parameters():
            gradient = self._held_gradients.pop(parameter, parameter.grad)
            if gradient is None:
                continue
            if parameter.device == device:
                parameter.grad = gradient.to(device)
            else:
                parameter.grad = None
                self._held_gradients[parameter] = gradient.to(device)


def _moves(name: str, value: object) -> bool:
    """Return False for the step counters, which optimizers keep on the host."""
    return isinstance(value, Tensor) and name != "step"
