"""Selections by covariance and entropy, compared with hand-worked numbers and loops in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.algorithms import covariances, high_entropy_tokens, largest_tokens, tokens_between

F64 = torch.float64
NAN = float("nan")


@st.composite
def tokens(draw):
    """Draw two columns of numbers and a mask."""
    size = draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    columns = torch.randn(2, size, dtype=F64, generator=generator)
    return *columns, torch.rand(size, generator=generator) < 0.7


def test_covariances_by_hand():
    # log-probs -1, -2, -3 of mean -2; advantages 1, 0, -4 of mean -1: (2)(1), (1)(0), (-3)(-1)
    mask = torch.tensor([True, True, False, True])
    log_probs, advantages = torch.tensor([-1.0, -2.0, NAN, -3.0]), torch.tensor([1.0, 0.0, NAN, -4.0])
    assert covariances(log_probs, advantages, mask).tolist() == pytest.approx([2, 0, 0, 3])


@given(tokens())
def test_mean_of_the_covariances_is_the_covariance(drawn):
    log_probs, advantages, mask = drawn
    expected = torch.zeros((), dtype=F64)
    if mask.any():
        expected = torch.cov(torch.stack([log_probs[mask], advantages[mask]]), correction=0)[0, 1]
    actual = covariances(log_probs, advantages, mask)
    torch.testing.assert_close(actual.sum() / max(int(mask.sum()), 1), expected)


def test_equal_advantages_have_no_covariance():
    assert (covariances(torch.randn(4), torch.full((4,), 0.3), torch.ones(4, dtype=torch.bool)) == 0).all()


def test_largest_tokens_by_hand():
    values = torch.tensor([5.0, 1.0, NAN, 4.0, 3.0, 2.0])
    mask = torch.tensor([True, True, False, True, True, True])
    assert largest_tokens(values, mask, 0.4).tolist() == [True, False, False, True, False, False]
    assert largest_tokens(values, mask, 1e-4).tolist() == [True] + [False] * 5  # at least one
    assert not largest_tokens(values, torch.zeros(6, dtype=torch.bool), 0.5).any()


def test_first_of_equal_values_is_selected():
    assert largest_tokens(torch.ones(4), torch.tensor([False, True, True, True]), 0.5).tolist() == [
        False, True, False, False,
    ]  # fmt: skip


def test_tokens_between_by_hand():
    # Candidates are strictly between 1 and 5: 1.5, 2, 4. Of six tokens, 0.34 are two; those of the smallest order.
    values = torch.tensor([1.5, 2.0, 4.0, 5.0, 1.0, 9.0])
    order = torch.tensor([0.3, 0.9, 0.1, 0.0, 0.0, 0.0])
    mask = torch.ones(6, dtype=torch.bool)
    assert tokens_between(values, mask, 0.34, (1.0, 5.0), order).tolist() == [True, False, True, False, False, False]
    assert tokens_between(values, mask, 1e-4, (1.0, 5.0), order).tolist() == [False, False, True, False, False, False]
    assert not tokens_between(values, mask, 0.5, (6.0, 8.0), order).any()


@given(tokens(), st.floats(0.01, 1))
def test_tokens_between_match_a_loop(drawn, ratio):
    values, order, mask = drawn
    candidates = [i for i in range(len(values)) if mask[i] and -0.5 < values[i] < 1]
    count = max(int(ratio * int(mask.sum())), 1)
    expected = set(sorted(candidates, key=lambda i: float(order[i]))[:count])
    assert {i for i, taken in enumerate(tokens_between(values, mask, ratio, (-0.5, 1.0), order)) if taken} == expected


@pytest.mark.parametrize(
    ("quantile", "expected"),
    [
        (1.0, [0, 1, 2, 3, 4]),
        (0.2, [4]),  # the quantile 0.8 is 3.2
        (0.25, [3, 4]),  # the quantile 0.75 is 3 exactly
        (0.5, [2, 3, 4]),
        (0.0, [4]),
    ],
)
def test_high_entropy_by_hand(quantile, expected):
    entropy = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, NAN])
    mask = torch.tensor([True] * 5 + [False])
    assert high_entropy_tokens(entropy, mask, quantile).nonzero().flatten().tolist() == expected


@given(tokens(), st.floats(0, 1))
def test_high_entropy_is_a_quantile(drawn, quantile):
    entropy, _, mask = drawn
    selected = high_entropy_tokens(entropy, mask, quantile)
    if not mask.any():
        assert not selected.any()
        return
    threshold = torch.quantile(entropy[mask], 1 - quantile)
    close = (entropy - threshold).abs() < 1e-5  # the quantile of torch rounds
    assert ((selected == (mask & (entropy >= threshold))) | close).all()
    assert selected.any()


def test_equal_entropies_are_all_selected():
    assert high_entropy_tokens(torch.full((5,), 0.7), torch.ones(5, dtype=torch.bool), 0.2).all()


@given(tokens(), st.integers(0, 1000))
def test_order_of_the_tokens_does_not_matter(drawn, seed):
    values, order, mask = drawn
    index = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    for select in (
        lambda i: largest_tokens(values[i], mask[i], 0.3),
        lambda i: tokens_between(values[i], mask[i], 0.3, (-1.0, 1.0), order[i]),
        lambda i: high_entropy_tokens(values[i], mask[i], 0.3),
    ):
        assert (select(torch.arange(len(values)))[index] == select(index)).all()


@given(tokens(), st.sampled_from([NAN, math.inf, -math.inf]))
def test_values_outside_the_mask_do_not_matter(drawn, junk):
    values, order, mask = drawn
    spoilt = torch.where(mask, values, junk)
    assert (largest_tokens(spoilt, mask, 0.3) == largest_tokens(values, mask, 0.3)).all()
    assert (high_entropy_tokens(spoilt, mask, 0.3) == high_entropy_tokens(values, mask, 0.3)).all()
    assert (covariances(spoilt, spoilt, mask) == covariances(values, values, mask)).all()
    assert (tokens_between(spoilt, mask, 0.3, (0, 1), order) == tokens_between(values, mask, 0.3, (0, 1), order)).all()
