"""Offload between phases, with fake tensors and with an emulated CUDA device.

Parameters do not move as fake tensors, because torch cannot swap these; on the emulated device they do.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from support.emulated_cuda import DEVICE as EMULATED
from support.emulated_cuda import Emulator, emulated_cuda
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from camshaft.engine.offload import HOST, Part, Parts

DEVICE = torch.device("cuda", 0)
PARTS: tuple[Part, ...] = ("model", "gradients", "optimizer")


class RecordingParts(Parts):
    """Record moves, to check that a part that may stay does not move."""

    moves: list[tuple[str, str]]

    def move(self, parts: Iterable[Part], device: torch.device) -> None:
        moved = list(parts)
        self.moves += [(part, device.type) for part in moved]
        super().move(moved, device)


def _made(
    resting: tuple[Part, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[RecordingParts, torch.nn.Module, torch.optim.Optimizer]:
    for function in ("release_cache", "synchronize"):  # this device does not exist
        monkeypatch.setattr(f"camshaft.engine.offload.{function}", lambda device: None)
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


# -- asynchronous copies ---------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[Emulator]:
    with emulated_cuda() as device:
        yield device


def trained(device: Emulator) -> tuple[Parts, torch.nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
    """Return a model after one step, with all its parts offloaded, and the values that the parts must have."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2).to(EMULATED)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    parts = Parts(module, optimizer, torch.device(EMULATED, 0), PARTS)
    with parts.on_device(*PARTS):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape).to(EMULATED)
        optimizer.step()
        expected = {name: tensor.cpu().clone() for name, tensor in values(module, optimizer).items()}
        device.reset()
    return parts, module, optimizer, expected


def values(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        state = optimizer.state[parameter]
        tensors |= {
            name: parameter.detach(),
            f"{name}.exp_avg": state["exp_avg"],
            f"{name}.square": state["exp_avg_sq"],
        }
        if parameter.grad is not None:
            tensors[f"{name}.grad"] = parameter.grad
    return tensors


def test_copies_to_host_memory_wait_once(device: Emulator) -> None:
    """The block of `trained` ends with copies to the host, which arrive when the host waits."""
    _, module, optimizer, expected = trained(device)
    assert device.synchronizations == 1
    assert not device.waits
    actual = values(module, optimizer)
    assert len(actual) == 8
    assert all(type(tensor) is Tensor and torch.equal(tensor, expected[name]) for name, tensor in actual.items())


def test_copies_to_the_device_do_not_wait(device: Emulator) -> None:
    parts, module, optimizer, expected = trained(device)
    device.reset()
    with parts.on_device(*PARTS):
        assert not device.waits
        assert device.synchronizations == 0
        actual = values(module, optimizer)
        assert all(tensor.is_cuda and torch.equal(tensor.cpu(), expected[name]) for name, tensor in actual.items())
        device.reset()
    assert device.synchronizations == 1
    assert not device.waits


def test_without_the_wait_the_host_would_read_other_values(device: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("camshaft.engine.offload.synchronize", lambda device: None)
    _, module, optimizer, expected = trained(device)
    assert not any(torch.equal(tensor, expected[name]) for name, tensor in values(module, optimizer).items())
