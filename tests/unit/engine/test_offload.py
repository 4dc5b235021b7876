"""Offload between phases, with the meta device as the accelerator.

The parameters do not move in these tests (torch cannot swap such tensors); tests/gpu moves real ones.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from camshaft.engine.offload import HOST, Part, Parts

DEVICE = torch.device("cuda", 0)
PARTS: tuple[Part, ...] = ("model", "gradients", "optimizer")


class RecordingParts(Parts):
    """Record moves, to check that a part that may stay does not move."""

    moves: list[tuple[str, str]]

    def move(self, part: Part, device: torch.device) -> None:
        self.moves.append((part, device.type))
        super().move(part, device)


def _made(
    resting: tuple[Part, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[RecordingParts, torch.nn.Module, torch.optim.Optimizer]:
    monkeypatch.setattr("camshaft.engine.offload.release_cache", lambda device: None)  # this device does not exist
    module = torch.nn.Module()
    module.weight, module.bias = (torch.nn.Parameter(torch.empty(size, device=DEVICE)) for size in ((2, 3), (2,)))
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    RecordingParts.moves = []
    return RecordingParts(module, optimizer, DEVICE, resting), module, optimizer


def _step(parts: Parts, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with parts.on_device(*PARTS):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(parameter)}


def _places(parts: Parts) -> dict[str, str]:
    return {part: place.type for part in PARTS if (place := parts.device_of(part)) is not None}


@pytest.mark.parametrize("resting", [(), ("gradients",), ("optimizer",), ("gradients", "optimizer")], ids="+".join)
def test_parts_are_offloaded_as_configured(resting: tuple[Part, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        parts, module, optimizer = _made(resting, monkeypatch)
        _step(parts, module, optimizer)
        expected = {part: "cpu" if part in resting else "cuda" for part in PARTS}
        assert _places(parts) == expected
        with parts.on_device("model"):
            assert _places(parts)["model"] == "cuda"
            assert _places(parts)["optimizer"] == expected["optimizer"]
        with parts.on_device(*PARTS):
            assert {p.grad.device.type for p in module.parameters() if p.grad is not None} == {"cuda"}
            assert set(_places(parts).values()) == {"cuda"}
        assert _places(parts) == expected


def test_nothing_moves_without_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        parts, module, optimizer = _made((), monkeypatch)
        _step(parts, module, optimizer)
        assert parts.moves == []


def test_nested_blocks_leave_loaded_parts_to_the_outer_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        parts, module, optimizer = _made(("optimizer",), monkeypatch)
        _step(parts, module, optimizer)
        with parts.on_device("optimizer"):
            with parts.on_device("model", "optimizer"):
                pass
            assert parts.device_of("optimizer") == DEVICE
        assert parts.device_of("optimizer") == HOST


def test_pending_gradients_are_also_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        parts, module, optimizer = _made(("gradients",), monkeypatch)
        _step(parts, module, optimizer)
        parts.clear_gradients()
        assert parts.device_of("gradients") is None
        with parts.on_device(*PARTS):
            assert all(parameter.grad is None for parameter in module.parameters())
