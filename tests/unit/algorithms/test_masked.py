"""Masked statistics, compared with hand-worked numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.algorithms import masked_mean, masked_sum, masked_var, whiten

NAN = float("nan")
X = torch.tensor([[1.0, 2.0, NAN], [6.0, math.inf, NAN]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_sum_and_mean_over_everything_read_counted_values_only():
    assert masked_sum(X, MASK) == 9  # 1 + 2 + 6
    assert masked_mean(X, MASK) == 3  # 9 / 3


def test_sum_and_mean_along_a_dim():
    assert masked_sum(X, MASK, dim=1).tolist() == [3, 6]
    assert masked_mean(X, MASK, dim=1).tolist() == [1.5, 6]


def test_mean_of_nothing_is_zero():
    assert masked_mean(X, torch.zeros_like(MASK), dim=1).tolist() == [0, 0]


def test_variance_is_unbiased():
    # mean 3; (4 + 1 + 9) / (3 - 1)
    assert masked_var(X, MASK) == 7


def test_variance_without_a_mask_matches_torch():
    x = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(masked_var(x, torch.ones(50, dtype=torch.bool)), x.var())


@pytest.mark.parametrize("count", [0, 1])
def test_variance_of_fewer_than_two_is_an_error(count):
    mask = torch.arange(4) < count
    with pytest.raises(ValueError, match=f"the mask has {count}"):
        masked_var(torch.ones(4), mask)


def test_whitening_by_hand():
    # (1, 2, 6) - 3 = (-2, -1, 3), each / sqrt(7 + 1e-8)
    expected = torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]) / 7**0.5
    torch.testing.assert_close(whiten(X, MASK), expected)


def test_epsilon_is_under_the_root():
    # (1e-4, -1e-4): mean 0, variance 2e-8; 1e-4 / sqrt(2e-8 + 1e-8) = 1 / sqrt(3)
    x = torch.tensor([1e-4, -1e-4], dtype=torch.float64)
    white = whiten(x, torch.tensor([True, True]))
    torch.testing.assert_close(white, torch.tensor([1.0, -1.0], dtype=torch.float64) / 3**0.5)


def test_equal_values_whiten_to_zero():
    # In float32, the mean of 5000 values of 1000.3 is not 1000.3.
    assert not whiten(torch.full((5000,), 1000.3), torch.ones(5000, dtype=torch.bool)).any()


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20), st.integers(0, 5))
def test_whitening_does_not_depend_on_padding(values, padding):
    x = torch.tensor(values, dtype=torch.float64)
    mask = torch.arange(len(x) + padding) < len(x)
    padded = torch.cat([x, torch.full((padding,), NAN, dtype=torch.float64)])
    white = whiten(padded, mask)
    torch.testing.assert_close(white[: len(x)], whiten(x, mask[: len(x)]))
    assert (white[len(x) :] == 0).all()
    assert abs(float(white.sum())) < 1e-6


def test_gradient_is_zero_where_nothing_is_read():
    x = X.double().requires_grad_()
    masked_mean(x, MASK).backward()
    third = 1 / 3
    torch.testing.assert_close(x.grad, torch.tensor([[third, third, 0.0], [third, 0.0, 0.0]], dtype=torch.float64))
