"""The loss of a reward model, compared with hand-worked numbers and with torch."""

import math

import pytest
import torch
from torch import Tensor

from camshaft.algorithms import preference_loss


def pairs() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    chosen, rejected = torch.randn(2, 6, generator=random, dtype=torch.float64)
    return chosen, rejected, torch.tensor([0.0, 0.5, 0.0, 1.0, 0.25, 0.0])


def test_numbers_by_hand() -> None:
    # Leads of 2, 0 and -1; -log sigmoid(d) = log(1 + exp(-d)).
    chosen, rejected = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])
    loss, metrics = preference_loss(chosen, rejected, torch.zeros(3), 3)
    expected = math.log(1 + math.exp(-2)) + math.log(2) + math.log(1 + math.e)
    assert float(loss) == pytest.approx(expected / 3)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {"accuracy": 1 / 3, "margin": 1 / 3, "chosen_reward": 4 / 3, "rejected_reward": 1}
    )


def test_a_margin_is_taken_off_the_lead() -> None:
    loss, metrics = preference_loss(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.5]), 1)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-1.5)))
    assert float(metrics["margin"]) == 2


def test_centering_adds_the_square_of_the_sum() -> None:
    chosen, rejected, margin = torch.tensor([3.0, -1.0]), torch.tensor([1.0, 0.0]), torch.zeros(2)
    uncentered, _ = preference_loss(chosen, rejected, margin, 2)
    centered, _ = preference_loss(chosen, rejected, margin, 2, center=0.1)
    assert float(centered - uncentered) == pytest.approx(0.1 * (16 + 1) / 2)


def test_shares_of_parts_add_up() -> None:
    columns = pairs()
    total, metrics = preference_loss(*columns, 6, center=0.01)
    parts = [
        preference_loss(*(c[rows] for c in columns), num_pairs=6, center=0.01) for rows in (slice(0, 1), slice(1, 6))
    ]
    assert float(total) == pytest.approx(sum(float(loss) for loss, _ in parts), rel=1e-12)
    for name, value in metrics.items():
        assert float(value) == pytest.approx(sum(float(share[name]) for _, share in parts), rel=1e-6)


def test_large_leads_stay_finite_and_metrics_have_no_gradient() -> None:
    chosen = torch.tensor([1e4, -1e4], requires_grad=True)
    loss, metrics = preference_loss(chosen, torch.zeros(2), torch.zeros(2), 2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(5e3)
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [0, -0.5]
    assert not any(value.requires_grad for value in metrics.values())
