import dataclasses
import math
import re
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_warm_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from camshaft.config.engine import OPTIMIZERS, UNSUPPORTED_OPTIMIZERS, OptimConfig
from camshaft.engine.base import StepHyperparameters
from camshaft.engine.optim import (
    Schedule,
    build_optimizer,
    clip_and_step,
    learning_rate_at,
    replaced_hyperparameters,
)
from camshaft.errors import EngineError


def test_warm_up_rises_from_above_zero_to_the_full_rate() -> None:
    optim = OptimConfig(lr=4.0, lr_warmup_steps=4)
    assert [learning_rate_at(optim, k) for k in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_cosine_decays_from_the_full_rate_to_the_minimum() -> None:
    optim = OptimConfig(lr=1.0, lr_scheduler_type="cosine", total_training_steps=4, min_lr_ratio=0.2)
    # 0.2 + 0.8 * (1 + cos(pi k / 4)) / 2
    expected = [1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2, 0.2]
    assert [learning_rate_at(optim, k) for k in range(6)] == pytest.approx(expected)


def test_linear_schedule_decays_from_full_rate_to_minimum() -> None:
    optim = OptimConfig(
        lr=2.0, lr_scheduler_type="linear", lr_warmup_steps=2, total_training_steps=6, min_lr_ratio=0.25
    )
    # Up in 2 updates, then down by (2 - 0.5) / 4 = 0.375 each until update 6, then constant at the minimum.
    expected = [1.0, 2.0, 2.0, 1.625, 1.25, 0.875, 0.5, 0.5]
    assert [learning_rate_at(optim, k) for k in range(8)] == pytest.approx(expected)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_a_decaying_rate_needs_the_run_length(shape: Literal["cosine", "linear"]) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optim = OptimConfig(lr=1.0, lr_scheduler_type=shape)
    with pytest.raises(EngineError, match=f"{shape} requires optim.total_training_steps"):
        Schedule(build_optimizer([weight], optim), optim)


def test_schedule_sets_the_rate_of_every_group() -> None:
    optim = OptimConfig(lr=1.0, lr_warmup_steps=2)
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(1))], optim)
    schedule = Schedule(optimizer, optim)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert schedule.set_update(1) == 1.0
    assert optimizer.param_groups[0]["lr"] == 1.0


STEP = StepHyperparameters(lr=0.2, betas=(0.5, 0.6), eps=0.3, weight_decay=0.4)


def test_hyperparameters_of_a_step_are_restored_after_an_error() -> None:
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(1))], OptimConfig(lr=1.0))
    group = optimizer.param_groups[0]
    before = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}

    def fail(*_: Any) -> None:
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.2, (0.5, 0.6), 0.3, 0.4)
        raise ZeroDivisionError

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError), replaced_hyperparameters(optimizer, STEP):
        optimizer.step()
    assert {name: group[name] for name in before} == before


def test_an_optimizer_without_betas_rejects_hyperparameters_of_a_step() -> None:
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(1))], OptimConfig(optimizer="SGD"))
    with pytest.raises(EngineError, match="SGD has no betas, eps"), replaced_hyperparameters(optimizer, STEP):
        pass


@pytest.mark.parametrize(
    "change", [{"lr": -1.0}, {"eps": math.nan}, {"betas": (0.9, 1.0)}, {"weight_decay": math.inf}, {"clip_grad": -1.0}]
)
def test_an_invalid_hyperparameter_of_a_step_is_named(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(EngineError, match=re.escape(f"StepHyperparameters: {name}={value}")):
        dataclasses.replace(STEP, **change)


def test_first_adamw_update_by_hand() -> None:
    # m_hat = g, v_hat = g^2: the update is lr * g / (|g| + eps) plus lr * decay * w = 0.1 * 1 + 0.1 * 0.5 * 2
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = build_optimizer([weight], OptimConfig(lr=0.1, weight_decay=0.5))
    weight.grad = torch.tensor([3.0])
    norm, stepped = clip_and_step(optimizer, 100.0)
    assert (norm, stepped) == (3.0, True)
    assert weight.item() == pytest.approx(2.0 - 0.1 - 0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_nothing(bad: float) -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, 1.0]))
    optimizer = build_optimizer([weight], OptimConfig(lr=0.1))
    weight.grad = torch.tensor([1.0, bad])
    norm, stepped = clip_and_step(optimizer, 1.0)
    assert not stepped
    assert not math.isfinite(norm)
    assert weight.tolist() == [2.0, 1.0]


def test_a_step_without_gradients_is_rejected() -> None:
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(1))], OptimConfig())
    with pytest.raises(EngineError, match="no gradient"):
        clip_and_step(optimizer, 1.0)


def built(**optim: Any) -> torch.optim.Optimizer:
    return build_optimizer([torch.nn.Parameter(torch.ones(2, 2))], OptimConfig(**optim))


def test_the_default_optimizer_is_adamw_with_config_values() -> None:
    optimizer = built(lr=0.5, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.25)
    assert type(optimizer) is torch.optim.AdamW
    settings = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.25, "foreach": None, "fused": True}
    assert {key: optimizer.defaults[key] for key in settings} == settings
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["SGD", "torch.optim.SGD", "torch.optim:SGD", "torch.optim.sgd:SGD"])
def test_an_optimizer_class_receives_only_supported_arguments(name: str) -> None:
    optimizer = built(optimizer=name, lr=0.5, weight_decay=0.25, override_optimizer_config={"momentum": 0.7})
    assert type(optimizer) is torch.optim.SGD
    settings = {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.7, "foreach": True, "fused": None}
    assert {key: optimizer.defaults[key] for key in settings} == settings
    assert "betas" not in optimizer.defaults


def test_other_optimizer_classes_use_foreach() -> None:
    assert built(optimizer="RMSprop").defaults["foreach"] is True


def test_unrelated_arguments_of_the_same_name_keep_defaults() -> None:
    optimizer = built(optimizer="Adafactor", lr=0.5, eps=1e-3)
    assert optimizer.defaults["eps"] == (None, 1e-3)
    assert optimizer.defaults["lr"] == 0.5


class Passing(torch.optim.AdamW):
    """An optimizer that passes its arguments on."""

    def __init__(self, params: Any, **kwargs: Any):
        super().__init__(params, **kwargs)


class Plain(torch.optim.SGD):
    """An optimizer with a learning rate only."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr)


def test_a_class_with_keyword_arguments_receives_those_of_its_base() -> None:
    optimizer = built(optimizer=f"{__name__}:Passing", betas=(0.5, 0.6), weight_decay=0.3)
    assert (optimizer.defaults["betas"], optimizer.defaults["weight_decay"]) == ((0.5, 0.6), 0.3)


class Outer:
    Inner = Passing


def test_an_optimizer_can_be_an_attribute_of_a_class() -> None:
    assert type(built(optimizer=f"{__name__}:Outer.Inner")) is Passing


def test_a_setting_that_an_optimizer_does_not_accept_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    built(optimizer=f"{__name__}:Plain")
    assert not caplog.records
    built(optimizer=f"{__name__}:Plain", weight_decay=0.3)
    assert "does not accept weight_decay=0.3" in caplog.text


def test_overrides_win_and_lists_become_tuples() -> None:
    optimizer = built(betas=(0.8, 0.9), override_optimizer_config={"betas": [0.5, 0.6], "amsgrad": True})
    assert optimizer.defaults["betas"] == (0.5, 0.6)
    assert optimizer.defaults["amsgrad"] is True
    assert built(override_optimizer_config={"fused": True}).defaults["foreach"] is None


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"optimizer": "adamw"}, "Did you mean 'AdamW'"),
        ({"optimizer": "Optimizer"}, "torch.optim has no optimizer 'Optimizer'"),
        ({"optimizer": "LBFGS"}, "LBFGS is not supported: it evaluates the loss several times"),
        ({"optimizer": "torch.optim.SparseAdam"}, "sparse gradients"),
        ({"optimizer": "torch.nn:Linear"}, "not a subclass of torch.optim.Optimizer"),
        (
            {"override_optimizer_config": {"momentum": 0.9}},
            "contains momentum, which AdamW does not accept; its arguments are betas, eps",
        ),
        ({"override_optimizer_config": {"lr": 0.9}}, "set optim.lr"),
        ({"override_optimizer_config": {"betas": (1.0, 2.0)}}, "Invalid beta parameter"),
    ],
    ids=str,
)
def test_impossible_settings_are_errors_with_a_fix(optim: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        built(**optim)


def test_every_optimizer_of_torch_is_supported_or_rejected_with_a_reason() -> None:
    base = torch.optim.Optimizer
    classes = {name for name, value in vars(torch.optim).items() if isinstance(value, type) and issubclass(value, base)}
    assert classes - {"Optimizer"} == {*OPTIMIZERS, *UNSUPPORTED_OPTIMIZERS}


def test_an_unsupported_optimizer_reports_the_reason() -> None:
    with pytest.raises(EngineError, match="optimizer=Muon rejects the parameters"):
        build_optimizer([torch.nn.Parameter(torch.ones(3))], OptimConfig(optimizer="Muon"))
    assert type(built(optimizer="Muon")) is torch.optim.Muon


def test_frozen_parameters_stay_out_and_all_frozen_is_rejected() -> None:
    free, frozen = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1), requires_grad=False)
    assert build_optimizer([frozen, free], OptimConfig()).param_groups[0]["params"] == [free]
    with pytest.raises(EngineError, match="nothing to train"):
        build_optimizer([frozen], OptimConfig())


class WantsLoss(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


def test_an_optimizer_class_that_needs_the_loss_is_rejected() -> None:
    with pytest.raises(EngineError, match="requires a closure that computes the loss"):
        built(optimizer=f"{__name__}:WantsLoss")


# -- over ranks -----------------------------------------------------------------------------------

SHAPES = ((4, 6), (8, 3), (5,), (3, 4), (7, 2))


def full(seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def laid_out(tensors: list[torch.Tensor], outer: int) -> list[torch.Tensor]:
    """Shard over a 2-D mesh in two ways and over each of its dimensions, or not at all."""
    mesh = init_device_mesh("cpu", (outer, dist.get_world_size() // outer), mesh_dim_names=("dp", "tp"))
    places = [
        (mesh, (Shard(0), Shard(1))),
        (mesh, (Replicate(), Shard(0))),
        (mesh["dp"], (Shard(0),)),
        (mesh["tp"], (Shard(0),)),
        None,
    ]
    return [t if place is None else distribute_tensor(t, *place) for t, place in zip(tensors, places, strict=True)]


def steps_on_a_mesh(outer: int, optim: OptimConfig, max_norm: float) -> tuple[list[float], list[torch.Tensor]]:
    parameters = [torch.nn.Parameter(t) for t in laid_out(full(0), outer)]
    optimizer = build_optimizer(parameters, optim)
    norms = []
    for seed in (1, 2, 3):
        for parameter, gradient in zip(parameters, laid_out(full(seed), outer), strict=True):
            parameter.grad = gradient
        norm, stepped = clip_and_step(optimizer, max_norm)
        assert stepped
        norms.append(norm)
    return norms, [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in parameters]


def reject_unsharded_optimizers() -> list[str]:
    messages = []
    for name in ("Adafactor", "Rprop"):
        with pytest.raises(EngineError) as caught:
            steps_on_a_mesh(1, OptimConfig(lr=0.1, optimizer=name), 1.0)
        messages.append(str(caught.value))
    return messages


def test_optimizers_that_do_not_support_sharding_are_rejected_early() -> None:
    for messages in run_warm_ranks(reject_unsharded_optimizers, 2):
        assert all("does not support sharded parameters" in message for message in messages)
        assert messages[0].startswith("optimizer=Adafactor")


@pytest.mark.parametrize(("ranks", "outer"), [(2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize(
    ("name", "more"), [("AdamW", {}), ("AdamW", {"fused": True}), ("SGD", {"momentum": 0.9})], ids=str
)
def test_mixed_meshes_step_like_one_process(ranks: int, outer: int, name: str, more: dict[str, Any]) -> None:
    optim = OptimConfig(lr=0.1, optimizer=name, override_optimizer_config=more)
    parameters = [torch.nn.Parameter(t) for t in full(0)]
    alone = build_optimizer(parameters, optim)
    norms = []
    for seed in (1, 2, 3):
        for parameter, gradient in zip(parameters, full(seed), strict=True):
            parameter.grad = gradient
        norms.append(math.sqrt(sum(float((g.double() ** 2).sum()) for g in full(seed))))
        clip_and_step(alone, 2.0)
    for result, weights in run_warm_ranks(steps_on_a_mesh, ranks, outer, optim, 2.0):
        assert result == pytest.approx(norms, rel=1e-6)
        for weight, parameter in zip(weights, parameters, strict=True):
            torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)


def step_with_inf(outer: int) -> list[tuple[bool, bool, bool]]:
    """Return, for each gradient, (norm is finite, step was taken, rank is unchanged). Only rank 1 has an inf."""
    results = []
    for place in range(len(SHAPES)):
        parameters = [torch.nn.Parameter(t) for t in laid_out(full(0), outer)]
        optimizer = build_optimizer(parameters, OptimConfig(lr=0.1))
        for parameter, gradient in zip(parameters, laid_out(full(1), outer), strict=True):
            parameter.grad = gradient
        if dist.get_rank() == 1:
            local_part(parameters[place].grad).view(-1)[0] = math.inf
        norm, stepped = clip_and_step(optimizer, 1.0)
        before = zip(parameters, laid_out(full(0), outer), strict=True)
        same = all(torch.equal(local_part(p), local_part(t)) for p, t in before)
        results.append((math.isfinite(norm), stepped, same))
    return results


def local_part(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def test_a_non_finite_gradient_on_one_rank_skips_all() -> None:
    assert run_warm_ranks(step_with_inf, 4, 2) == [[(False, False, True)] * len(SHAPES)] * 4
