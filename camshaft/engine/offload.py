"""What an engine keeps in host memory between phases, and brings back for those that need it.

    parts = Parts(packed, optimizer, device, resting=("optimizer",))
    with parts.on_device("model", "optimizer"): ...      # there inside, and no other part is touched

Parts are "model", "gradients" and "optimizer". At the end of the outermost such block those that rest go to host
memory, the others to where they were before. Gradients may wait in host memory while the parameters stay: torch
wants both in one place, so they are then held here.
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
    """The places of one engine's parameters, gradients and optimizer state."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        resting: tuple[Part, ...] = (),
    ):
        self._module, self._optimizer, self._device = module, optimizer, device
        self._resting = resting
        self._in_use: set[Part] = set()
        self._waiting: dict[nn.Parameter, Tensor] = {}
        self._settle(dict.fromkeys(self._resting))

    @contextlib.contextmanager
    def on_device(self, *parts: Part) -> Iterator[None]:
        """The parts are where the engine computes."""
        taken: list[Part] = [part for part in parts if part not in self._in_use]
        before: dict[Part, torch.device | None] = {part: self.place(part) for part in taken}
        self._in_use.update(taken)
        try:
            for part, place in before.items():
                if place is not None and place.type != self._device.type:
                    self.move(part, self._device)
            yield
        finally:
            self._in_use.difference_update(taken)
            self._settle(before)

    def _settle(self, before: Mapping[Part, torch.device | None]) -> None:
        """Each part where it rests, or where it was."""
        for part, place in before.items():
            back = HOST if part in self._resting else place
            now = self.place(part)
            if back is not None and now is not None and now.type != back.type:
                self.move(part, back)

    def place(self, part: Part) -> torch.device | None:
        """Where a part is; None if there is none of it."""
        if part == "model":
            return next(self._module.parameters()).device
        if part == "gradients":
            held = self._waiting.values() or (p.grad for p in self._module.parameters() if p.grad is not None)
            return next((gradient.device for gradient in held), None)
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        tensors = (value for state in states for name, value in state.items() if _moves(name, value))
        return next((tensor.device for tensor in tensors), None)

    def move(self, part: Part, device: torch.device) -> None:
        """Put a part on `device`. Parameters take along the gradients that they hold."""
        if part == "model":
            self._module.to(device)
        elif part == "gradients":
            self._move_gradients(device)
        elif self._optimizer is not None:
            for state in self._optimizer.state.values():
                state.update({n: v.to(device) for n, v in state.items() if _moves(n, v)})
        if device.type != self._device.type:
            release_cache(self._device)

    def forget_gradients(self) -> None:
        """Also those that wait here."""
        self._waiting.clear()
        self._module.zero_grad(set_to_none=True)

    def _move_gradients(self, device: torch.device) -> None:
        for parameter in self._module.parameters():
            gradient = self._waiting.pop(parameter, parameter.grad)
            if gradient is None:
                continue
            if parameter.device == device:
                parameter.grad = gradient.to(device)
            else:
                parameter.grad = None
                self._waiting[parameter] = gradient.to(device)


def _moves(name: str, value: object) -> bool:
    """Optimizers count their steps on the host, wherever the moments are."""
    return isinstance(value, Tensor) and name != "step"
