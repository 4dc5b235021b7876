import math

import pytest
import torch

from camshaft.config.engine import OptimConfig
from camshaft.engine.optim import Schedule, build_optimizer, clip_and_step, rate
from camshaft.errors import EngineError


def test_warm_up_rises_from_above_zero_to_the_full_rate() -> None:
    optim = OptimConfig(lr=4.0, lr_warmup_steps=4)
    assert [rate(optim, k) for k in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]


def test_cosine_goes_from_the_full_rate_to_the_floor() -> None:
    optim = OptimConfig(lr=1.0, lr_scheduler_type="cosine", total_training_steps=4, min_lr_ratio=0.2)
    # 0.2 + 0.8 * (1 + cos(pi k / 4)) / 2
    expected = [1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2, 0.2]
    assert [rate(optim, k) for k in range(6)] == pytest.approx(expected)


def test_cosine_needs_the_length_of_the_run() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optim = OptimConfig(lr=1.0, lr_scheduler_type="cosine")
    with pytest.raises(EngineError, match="total_training_steps"):
        Schedule(build_optimizer([weight], optim), optim)


def test_schedule_sets_the_rate_of_every_group() -> None:
    optim = OptimConfig(lr=1.0, lr_warmup_steps=2)
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(1))], optim)
    schedule = Schedule(optimizer, optim)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert schedule.go_to(1) == 1.0
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_first_adamw_update_by_hand() -> None:
    # m_hat = g, v_hat = g^2: the update is lr * g / (|g| + eps) plus lr * decay * w = 0.1 * 1 + 0.1 * 0.5 * 2
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = build_optimizer([weight], OptimConfig(lr=0.1, weight_decay=0.5))
    weight.grad = torch.tensor([3.0])
    norm, done = clip_and_step(optimizer, 100.0)
    assert (norm, done) == (3.0, True)
    assert weight.item() == pytest.approx(2.0 - 0.1 - 0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, 1.0]))
    optimizer = build_optimizer([weight], OptimConfig(lr=0.1))
    weight.grad = torch.tensor([1.0, bad])
    norm, done = clip_and_step(optimizer, 1.0)
    assert not done
    assert not math.isfinite(norm)
    assert weight.tolist() == [2.0, 1.0]


def test_a_step_without_gradients_is_refused() -> None:
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(1))], OptimConfig())
    with pytest.raises(EngineError, match="no gradient"):
        clip_and_step(optimizer, 1.0)
