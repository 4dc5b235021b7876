"""The state of torch's optimizers passes through a checkpoint unchanged, on one rank and on several."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_warm_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from camshaft.engine.checkpoint import State, load_into, optimizer_state, optimizer_targets, save
from camshaft.errors import CheckpointError

SHAPES = {"a.weight": (5, 3), "b.weight": (4, 4), "c.weight": (1, 6), "idle.weight": (3, 3)}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "StatefulSGD": lambda p: StatefulSGD(p),
    "SharingSGD": lambda p: SharingSGD(p),
}


class StatefulSGD(torch.optim.Optimizer):
    """An optimizer with state that is not a tensor, as some other libraries have."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["scale"] = state.get("scale", 1.0) / 3.0
                state["kept"] = None
                parameter.add_(parameter.grad, alpha=-state["scale"] / state["step"])


class SharingSGD(torch.optim.Optimizer):
    """An optimizer whose states share a tensor, which all parameters change, and a table that none changes."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})
        self.table = torch.linspace(0.5, 1.0, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None]
        for parameter in trained:
            state = self.state[parameter]
            if not state:
                count = next((other["count"] for other in self.state.values() if other), torch.zeros(()))
                state.update(count=count, table=self.table, of_table=self.table[:8], own=torch.zeros(()))
            state["count"] += 1
            state["own"] += state["table"].mean()
            parameter.add_(parameter.grad, alpha=-0.1 * float(state["own"] / state["count"]))


def engine(name: str, seed: int, sharded: bool) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    draw = torch.Generator().manual_seed(seed)
    weights = {key: torch.randn(shape, generator=draw) for key, shape in SHAPES.items()}
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weights = {key: distribute_tensor(weight, mesh, [Shard(0)]) for key, weight in weights.items()}
    parameters = {key: torch.nn.Parameter(weight) for key, weight in weights.items()}
    return dict(parameters), OPTIMIZERS[name](list(parameters.values()))


def train(parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train with a parameter that never has a gradient, and so has no state."""
    for step in steps:
        draw = torch.Generator().manual_seed(100 + step)
        for name, parameter in parameters.items():
            grad = torch.randn(SHAPES[name], generator=draw)
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
            parameter.grad = None if name.startswith("idle") else grad
        optimizer.step()


def all_of(parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors, values = optimizer_state(optimizer, parameters)
    state = {**parameters, **tensors}
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    return {n: t.detach().clone() for n, t in full.items()} | values


def same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert type(actual[name]) is type(value), name
        if isinstance(value, Tensor):
            assert torch.equal(actual[name], value), name
            assert actual[name].dtype == value.dtype, name
        else:
            assert actual[name] == value, name


def train_and_save(folder: str, name: str, sharded: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (state when it was saved, state two steps later)."""
    parameters, optimizer = engine(name, 1, sharded)
    train(parameters, optimizer, range(2))
    save(State.collect(parameters, optimizer, parameters, {}, {}), folder, group=dist.group.WORLD if sharded else None)
    saved = all_of(parameters, optimizer)
    train(parameters, optimizer, range(2, 4))
    return saved, all_of(parameters, optimizer)


def load_and_train(folder: str, name: str, sharded: bool, used_before: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    parameters, optimizer = engine(name, 2, sharded)
    if used_before:
        train(parameters, optimizer, range(7))
    load_into(folder, parameters, optimizer, parameters, group=dist.group.WORLD if sharded else None)
    loaded = all_of(parameters, optimizer)
    for state in optimizer.state.values():
        assert all(not value.requires_grad for value in state.values() if isinstance(value, Tensor))
    train(parameters, optimizer, range(2, 4))
    return loaded, all_of(parameters, optimizer)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in ("AMSGrad", "StatefulSGD", "SharingSGD")))
        for n in OPTIMIZERS
    ],
)
def test_state_is_restored_exactly_on_other_ranks_and_on_none(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    (saved, later), *_ = run_warm_ranks(train_and_save, 2, folder, name, True)
    loaded, went_on = load_and_train(folder, name, False, True)
    same(loaded, saved)
    same(went_on, later)
    for loaded, went_on in run_warm_ranks(load_and_train, 3, folder, name, True, False):
        same(loaded, saved)
        same(went_on, later)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_state_of_one_process_is_restored_on_ranks(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    saved, later = train_and_save(folder, name, False)
    for loaded, went_on in run_warm_ranks(load_and_train, 2, folder, name, True, True):
        same(loaded, saved)
        same(went_on, later)


def test_shared_state_is_saved_and_shared_again(tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    saved, later = train_and_save(folder, "SharingSGD", False)
    loaded, went_on = load_and_train(folder, "SharingSGD", False, False)
    same(loaded, saved)
    same(went_on, later)
    parameters, optimizer = engine("SharingSGD", 2, False)
    load_into(folder, parameters, optimizer, parameters)
    for key, number in {"count": 1, "table": 1, "own": 3}.items():
        assert len({id(state[key]) for state in optimizer.state.values()}) == number, key


def layouts(folder: str) -> dict[str, bool]:
    parameters, optimizer = engine("NAdam", 1, True)
    stored = {"a.weight/exp_avg": ((5, 3), torch.float64), "a.weight/step": ((), torch.float32)}
    targets = optimizer_targets(optimizer, parameters, stored, Path(folder))
    average, step = targets["a.weight/exp_avg"], targets["a.weight/step"]
    assert isinstance(average, DTensor)
    assert average.placements == (Shard(0),)
    return {"dtype": average.dtype == torch.float64, "step is plain": not isinstance(step, DTensor)}


def test_state_of_the_parameters_shape_is_laid_out_like_it() -> None:
    assert run_warm_ranks(layouts, 2, "ckpt") == [{"dtype": True, "step is plain": True}] * 2


def test_unsupported_optimizer_state_is_rejected() -> None:
    parameters, optimizer = engine("SGD", 1, False)
    optimizer.state[parameters["a.weight"]]["history"] = [torch.zeros(3)]
    with pytest.raises(CheckpointError, match=r"SGD keeps a list as 'history' of a\.weight"):
        optimizer_state(optimizer, parameters)


def test_state_without_a_name_is_rejected() -> None:
    parameters, optimizer = engine("SGD", 1, False)
    train(parameters, optimizer, range(1))
    del parameters["b.weight"]
    with pytest.raises(CheckpointError, match="state of 1 parameters that have no name in the model"):
        optimizer_state(optimizer, parameters)
