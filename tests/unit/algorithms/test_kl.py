"""KL estimates, the exact KL, and the controllers of its weight."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.algorithms import KL_PENALTIES, AdaptiveKL, FixedKL, kl_penalty

LOG_2 = math.log(2)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # d = log 2 and -log 2: the token is twice, or half, as likely under pi as under pi_ref
        ("kl", [LOG_2, -LOG_2]),
        ("abs", [LOG_2, LOG_2]),
        ("mse", [LOG_2**2 / 2, LOG_2**2 / 2]),
        ("low_var_kl", [0.5 + LOG_2 - 1, 2 - LOG_2 - 1]),  # exp(-d) = 1/2 and 2
    ],
)
def test_estimates_by_hand(kind, expected):
    log_probs = torch.tensor([-1.0, -1.0 - LOG_2], dtype=torch.float64)
    ref = torch.tensor([-1.0 - LOG_2, -1.0], dtype=torch.float64)
    torch.testing.assert_close(kl_penalty(log_probs, ref, kind), torch.tensor(expected, dtype=torch.float64))


def test_low_var_kl_is_bounded():
    # exp(50) overflows nothing: d is clamped to -20, exp(20) to 10; at d = 50: exp(-20) + 20 - 1 -> 10
    far = kl_penalty(torch.tensor([-50.0, 0.0]), torch.tensor([0.0, -50.0]), "low_var_kl")
    assert far.tolist() == [10, 10]
    # d = 5 is inside the bounds: exp(-5) + 4
    near = kl_penalty(torch.tensor([0.0]), torch.tensor([-5.0]), "low_var_kl")
    torch.testing.assert_close(near, torch.tensor([math.exp(-5) + 4]))


def test_unknown_kind_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"'full'.*kl, abs, mse, low_var_kl.*full_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")


@pytest.mark.parametrize("kind", KL_PENALTIES)
def test_any_shape_elementwise(kind):
    a, b = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    grid = kl_penalty(a, b, kind)
    assert grid.shape == a.shape
    torch.testing.assert_close(grid.flatten(), kl_penalty(a.flatten(), b.flatten(), kind))


@pytest.mark.parametrize("kind", KL_PENALTIES)
def test_equal_policies_have_no_divergence(kind):
    x = torch.randn(5)
    assert (kl_penalty(x, x, kind) == 0).all()


@given(st.floats(-15, 15), st.sampled_from(["abs", "mse", "low_var_kl"]))
def test_all_estimates_but_k1_are_never_negative(d, kind):
    estimate = kl_penalty(torch.tensor(d, dtype=torch.float64), torch.zeros((), dtype=torch.float64), kind)
    assert estimate >= -torch.finfo(torch.float64).eps * (1 + abs(d))  # the terms of k3 round separately


@pytest.mark.parametrize("kind", ["kl", "mse", "low_var_kl"])
def test_gradients_match_finite_differences(kind):
    a = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, torch.zeros_like(x), kind), a)


@pytest.mark.parametrize("kind", ["kl", "low_var_kl"])
def test_unbiased_estimates_average_to_the_exact_kl(kind):
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(0)
    log_q = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(0)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    # the expectation over tokens drawn from p, taken exactly
    torch.testing.assert_close((log_p.exp() * kl_penalty(log_p, log_q, kind)).sum(), exact)


def test_fixed_controller_never_moves_and_has_no_state():
    controller = FixedKL(0.1)
    controller.update(current_kl=5.0, num_sequences=64)
    assert controller.coef == 0.1
    assert controller.state_dict() == {}
    resumed = FixedKL(0.2)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coef == 0.2


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.11, 0.2 * (1 + 0.1 * 64 / 1000)),  # 10 % above the target of 0.1
        (0.09, 0.2 * (1 - 0.1 * 64 / 1000)),
        (5.0, 0.2 * (1 + 0.2 * 64 / 1000)),  # clipped
        (0.0, 0.2 * (1 - 0.2 * 64 / 1000)),
        (0.1, 0.2),
        (math.inf, 0.2 * (1 + 0.2 * 64 / 1000)),
        (math.nan, 0.2),
    ],
)
def test_adaptive_controller_by_hand(kl, expected):
    controller = AdaptiveKL(coef=0.2, target=0.1, horizon=1000)
    controller.update(kl, num_sequences=64)
    assert controller.coef == pytest.approx(expected)


def test_adaptive_controller_resumes_from_a_checkpoint():
    one = AdaptiveKL(coef=0.2, target=0.1, horizon=1000)
    one.update(0.3, 64)
    other = AdaptiveKL(coef=0.2, target=0.1, horizon=1000)
    other.load_state_dict(one.state_dict())
    one.update(0.05, 64)
    other.update(0.05, 64)
    assert one.coef == other.coef != 0.2


def test_adaptive_controller_starts_from_the_config_after_a_fixed_one():
    controller = AdaptiveKL(coef=0.2, target=0.1, horizon=1000)
    controller.load_state_dict(FixedKL(0.5).state_dict())
    assert controller.coef == 0.2


@pytest.mark.parametrize("kind", ["kl", "abs", "low_var_kl"])
def test_straight_through_estimates_have_the_gradient_of_k2(kind):
    a = torch.tensor([0.3, -0.7, 1.1, 30.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros_like(a)
    value = kl_penalty(a, zero, f"{kind}+")
    torch.testing.assert_close(value, kl_penalty(a, zero, kind))
    (gradient,) = torch.autograd.grad(value.sum(), a)
    torch.testing.assert_close(gradient, a.detach())  # of d^2 / 2


@pytest.mark.parametrize(("kind", "is_unbiased"), [("kl+", True), ("low_var_kl+", True), ("mse", True), ("kl", False)])
def test_expected_gradient_of_straight_through_estimates_is_that_of_the_kl(kind, is_unbiased):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
    log_q = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(0)
    log_p = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    # the expectation over tokens drawn from p, which are constants to the loss
    (estimate,) = torch.autograd.grad((log_p.detach().exp() * kl_penalty(log_p, log_q, kind)).sum(), logits)
    assert torch.allclose(estimate, exact) is is_unbiased
