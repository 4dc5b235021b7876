"""Offloading of parameters, gradients and optimizer state to host memory between phases.

    parts = Parts(packed, optimizer, device, offloaded=("optimizer",))
    with parts.on_device("model", "optimizer"): ...      # both are on the device inside the block

The parts are "model", "gradients" and "optimizer". When the outermost block ends, each part in `offloaded` returns to
host memory, and every other part to the device it was on before. torch requires a gradient to be on the device of its
parameter. If gradients are offloaded and parameters are not, `Parts` therefore stores the gradients itself.

Copies do not wait for each other: torch allocates pinned host memory for a copy to the host with `non_blocking`, and a
copy from pinned memory to the device is asynchronous too. The host waits once, after the last copy of a block to host
memory. Copies to the device need no wait, because kernels that use them are queued behind them.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from camshaft.device import release_cache, synchronize

Part = Literal["model", "gradients", "optimizer"]

HOST = torch.device("cpu")


class Parts:
    """Moves the parameters, gradients and optimizer state of one engine between devices."""

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
        self._offloaded_gradients: dict[nn.Parameter, Tensor] = {}
        self._move_to(dict.fromkeys(offloaded, HOST))

    @contextlib.contextmanager
    def on_device(self, *parts: Part) -> Iterator[None]:
        """Move `parts` to the engine's compute device, and back on exit. Blocks may be nested."""
        unused: list[Part] = [part for part in parts if part not in self._in_use]
        previous_devices: dict[Part, torch.device | None] = {part: self.device_of(part) for part in unused}
        self._in_use.update(unused)
        try:
            self._move_to(dict.fromkeys(unused, self._device))
            yield
        finally:
            self._in_use.difference_update(unused)
            # Offloaded parts return to host memory, and the others to their previous devices.
            offloaded: list[Part] = [part for part in unused if part in self._offloaded]
            self._move_to(previous_devices | dict.fromkeys(offloaded, HOST))

    def _move_to(self, targets: Mapping[Part, torch.device | None]) -> None:
        """Move each part to its target, unless it has none, has no tensors, or is on a device of this type."""
        parts_of: dict[torch.device, list[Part]] = {}
        for part, target in targets.items():
            device = self.device_of(part)
            if target is not None and device is not None and device.type != target.type:
                parts_of.setdefault(target, []).append(part)
        for target, parts in parts_of.items():
            self.move(parts, target)

    def device_of(self, part: Part) -> torch.device | None:
        """Return the device of `part`, or None if it has no tensors yet."""
        if part == "model":
            return next(self._module.parameters()).device
        if part == "gradients":
            attached = (p.grad for p in self._module.parameters() if p.grad is not None)
            return next((gradient.device for gradient in self._offloaded_gradients.values() or attached), None)
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        tensors = (value for state in states for name, value in state.items() if _is_movable(name, value))
        return next((tensor.device for tensor in tensors), None)

    def move(self, parts: Iterable[Part], device: torch.device) -> None:
        """Move `parts` to `device`. Moving "model" also moves the gradients attached to its parameters."""
        for part in parts:
            if part == "model":
                self._module.to(device, non_blocking=True)
            elif part == "gradients":
                self._move_gradients(device)
            elif self._optimizer is not None:
                for state in self._optimizer.state.values():
                    state.update({n: v.to(device, non_blocking=True) for n, v in state.items() if _is_movable(n, v)})
        if device.type != self._device.type:
            synchronize(self._device)
            release_cache(self._device)

    def clear_gradients(self) -> None:
        """Clear all gradients, including offloaded ones."""
        self._offloaded_gradients.clear()
        self._module.zero_grad(set_to_none=True)

    def _move_gradients(self, device: torch.device) -> None:
        for parameter in self._module.parameters():
            gradient = self._offloaded_gradients.pop(parameter, parameter.grad)
            if gradient is None:
                continue
            if parameter.device == device:
                parameter.grad = gradient.to(device, non_blocking=True)
            else:
                parameter.grad = None
                self._offloaded_gradients[parameter] = gradient.to(device, non_blocking=True)


def _is_movable(name: str, value: object) -> bool:
    """Return True for the tensors of an optimizer state, except the counter `step`: it stays on its device."""
    return isinstance(value, Tensor) and name != "step"
