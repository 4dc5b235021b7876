"""Advantage estimators: hand-worked numbers, loops as an oracle, and invariances."""

import itertools
import math
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.algorithms import ESTIMATORS, AdvantageInputs, AdvantageOptions, group_advantages, masked_var
from camshaft.algorithms.advantages import (
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    tir_optimal_token_baseline,
    turn_return,
)

NAN = float("nan")
F64 = torch.float64

# Four rows, two groups, ragged: R = 1, 3, 2, 6 and lengths 2, 1, 3, 1.
REWARDS = torch.tensor([[0.0, 1.0, NAN], [3.0, NAN, NAN], [1.0, 0.0, 1.0], [6.0, NAN, NAN]], dtype=F64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
GROUPS = torch.tensor([7, 7, 3, 3])


def spread(*rows):
    """Return per-row numbers on the grid of MASK."""
    return torch.where(MASK, torch.tensor(rows, dtype=F64)[:, None], 0.0)


def whitened(grid, mask):
    """Whiten the counted entries with the standard library."""
    kept = grid[mask].tolist()
    mean, var = statistics.fmean(kept), statistics.variance(kept)
    return torch.where(mask, (grid - mean) / math.sqrt(var + 1e-8), 0.0)


# -- by hand ------------------------------------------------------------------------------------------


def test_gae_by_hand_with_a_tool_token_in_the_middle():
    rewards = torch.tensor([[0.0, NAN, 1.0]], dtype=F64)
    values = torch.tensor([[0.5, NAN, 0.25]], dtype=F64)
    mask = torch.tensor([[True, False, True]])
    # t=2: delta = 1 - 0.25 = 0.75 = A_2
    # t=1: passes through
    # t=0: delta = 0 + 0.8 * 0.25 - 0.5 = -0.3;  A_0 = -0.3 + 0.8 * 0.5 * 0.75 = 0
    # returns = (0 + 0.5, 0.75 + 0.25);  whitening (0, 0.75): mean 0.375, variance 2 * 0.375^2
    advantages, returns = gae(rewards, values, mask, gamma=0.8, lam=0.5)
    torch.testing.assert_close(returns, torch.tensor([[0.5, 0.0, 1.0]], dtype=F64))
    half = 0.375 / math.sqrt(2 * 0.375**2 + 1e-8)
    torch.testing.assert_close(advantages, torch.tensor([[-half, 0.0, half]], dtype=F64))


def test_gae_with_lambda_one_learns_from_the_plain_return():
    rewards = torch.tensor([[1.0, 2.0, 4.0]], dtype=F64)
    values = torch.tensor([[9.0, -3.0, 0.5]], dtype=F64)
    _, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[7.0, 6.0, 4.0]], dtype=F64))


@pytest.mark.parametrize("first_is_counted", [True, False])
def test_advantage_of_a_single_token_is_not_whitened(first_is_counted):
    rewards, values = torch.tensor([[3.0, 7.0]]), torch.tensor([[1.0, 9.0]])
    advantages, returns = gae(rewards, values, torch.tensor([[first_is_counted, False]]), gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, torch.tensor([[2.0 * first_is_counted, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[3.0 * first_is_counted, 0.0]]))


def test_variance_of_a_single_token_is_an_error():
    with pytest.raises(ValueError, match="at least 2 masked-in tokens"):
        masked_var(torch.ones(1, 2), torch.tensor([[True, False]]))


def test_grpo_by_hand():
    # group 7: R = 1, 3, mean 2, std sqrt(2);  group 3: R = 2, 6, mean 4, std sqrt(8)
    a, b = 1 / (math.sqrt(2) + 1e-6), 2 / (math.sqrt(8) + 1e-6)
    advantages, returns = grpo(REWARDS, MASK, GROUPS, norm_by_std=True)
    torch.testing.assert_close(advantages, spread(-a, a, -b, b))
    torch.testing.assert_close(returns, spread(1.0, 3.0, 2.0, 6.0))


def test_grpo_without_the_standard_deviation_only_centres():
    advantages, _ = grpo(REWARDS, MASK, GROUPS, norm_by_std=False)
    torch.testing.assert_close(advantages, spread(-1.0, 1.0, -2.0, 2.0))


def test_advantages_of_groups_by_hand():
    scores, groups = torch.tensor([1.0, 2.0, 6.0, 5.0, 2.0, 6.0]), torch.tensor([7, 7, 7, 9, 3, 3])
    # group 7: mean 3, variance (4 + 1 + 9) / 2 = 7;  group 9 of one row: mean 0, std 1;  group 3: mean 4, variance 8
    a, b = math.sqrt(7) + 1e-6, math.sqrt(8) + 1e-6
    expected = torch.tensor([-2 / a, -1 / a, 3 / a, 5 / (1 + 1e-6), -2 / b, 2 / b])
    torch.testing.assert_close(group_advantages(scores, groups), expected)
    centered = torch.tensor([-2.0, -1.0, 3.0, 5.0, -2.0, 2.0])
    torch.testing.assert_close(group_advantages(scores, groups, norm_by_std=False), centered)
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2;  5 - 0;  2 - 6, 6 - 2
    others = torch.tensor([-3.0, -1.5, 4.5, 5.0, -4.0, 4.0])
    torch.testing.assert_close(group_advantages(scores, groups, norm_by_std=False, leave_one_out=True), others)
    both = others / torch.tensor([a, a, a, 1 + 1e-6, b, b])
    torch.testing.assert_close(group_advantages(scores, groups, leave_one_out=True), both)


def test_equal_rewards_have_no_advantage_not_even_a_rounding_error():
    # 0.1 is not a binary fraction; a rounding error would be divided by std + 1e-6
    rewards, mask = torch.full((7, 1), 0.1), torch.ones(7, 1, dtype=torch.bool)
    advantages, _ = grpo(rewards, mask, torch.zeros(7, dtype=torch.int64))
    assert (advantages == 0).all()


def test_rloo_by_hand():
    # the other row of the group is the baseline: 1 - 3, 3 - 1, 2 - 6, 6 - 2
    advantages, _ = rloo(REWARDS, MASK, GROUPS)
    torch.testing.assert_close(advantages, spread(-2.0, 2.0, -4.0, 4.0))


def test_rloo_of_three():
    rewards = torch.tensor([[1.0], [2.0], [6.0]], dtype=F64)
    advantages, _ = rloo(rewards, torch.ones(3, 1, dtype=torch.bool), torch.zeros(3, dtype=torch.int64))
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    torch.testing.assert_close(advantages, torch.tensor([[-3.0], [-1.5], [4.5]], dtype=F64))


def test_opo_by_hand():
    # group 7: lengths 2, 1, b = (2 * 1 + 1 * 3) / 3 = 5/3;  group 3: lengths 3, 1, b = (3 * 2 + 1 * 6) / 4 = 3
    advantages, _ = opo(REWARDS, MASK, GROUPS)
    torch.testing.assert_close(advantages, spread(1 - 5 / 3, 3 - 5 / 3, -1.0, 3.0))


def test_reinforce_plus_plus_by_hand():
    # gamma 1/2: row 0: (0 + 1/2, 1); row 1: 3; row 2: (1 + 1/4, 1/2, 1); row 3: 6
    returns = torch.tensor([[0.5, 1.0, 0.0], [3.0, 0.0, 0.0], [1.25, 0.5, 1.0], [6.0, 0.0, 0.0]], dtype=F64)
    advantages, actual_returns = reinforce_plus_plus(REWARDS, MASK, gamma=0.5)
    torch.testing.assert_close(actual_returns, returns)
    torch.testing.assert_close(advantages, whitened(returns, MASK))


def test_reinforce_plus_plus_carries_the_return_over_a_tool_token():
    rewards = torch.tensor([[0.0, NAN, NAN, 2.0]], dtype=F64)
    _, returns = reinforce_plus_plus(rewards, torch.tensor([[True, False, False, True]]), gamma=0.5)
    torch.testing.assert_close(returns, torch.tensor([[1.0, 0.0, 0.0, 2.0]], dtype=F64))


def test_reinforce_plus_plus_baseline_by_hand():
    advantages, returns = reinforce_plus_plus_baseline(REWARDS, MASK, GROUPS)
    torch.testing.assert_close(advantages, whitened(spread(-1.0, 1.0, -2.0, 2.0), MASK))
    torch.testing.assert_close(returns, spread(1.0, 3.0, 2.0, 6.0))


def test_remax_by_hand():
    # reward-to-go (1, 1), (3), (2, 1, 1), (6) less the greedy rewards 1, 2, 0, 7
    to_go = torch.tensor([[1.0, 1.0, 0.0], [3.0, 0.0, 0.0], [2.0, 1.0, 1.0], [6.0, 0.0, 0.0]], dtype=F64)
    advantages, returns = remax(REWARDS, MASK, torch.tensor([1.0, 2.0, 0.0, 7.0], dtype=F64))
    expected = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [2.0, 1.0, 1.0], [-1.0, 0.0, 0.0]], dtype=F64)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, to_go)


@pytest.mark.parametrize(("norm_by_std", "scales"), [(True, (2**0.5 + 1e-6, 8**0.5 + 1e-6)), (False, (1.0, 1.0))])
def test_pass_at_k_credits_the_only_best_row(norm_by_std, scales):
    # group 7: 3 - 1 for the second row;  group 3: 6 - 2 for the fourth
    advantages, returns = grpo_passk(REWARDS, MASK, GROUPS, norm_by_std=norm_by_std)
    torch.testing.assert_close(advantages, spread(0.0, 2 / scales[0], 0.0, 4 / scales[1]))
    torch.testing.assert_close(returns, spread(1.0, 3.0, 2.0, 6.0))


def test_pass_at_k_credits_no_row_if_two_are_best():
    rewards, groups = torch.tensor([[1.0], [1.0], [0.0], [0.0], [0.0]]), torch.tensor([0, 0, 0, 1, 1])
    advantages, _ = grpo_passk(rewards, torch.ones(5, 1, dtype=torch.bool), groups)
    assert not advantages.any()


def test_gdpo_by_hand():
    # r_1 = 1, 3 | 2, 6 as for GRPO;  r_2 = 5, 5 | 0, 1: equal, and std sqrt(1/2).  w = 1, 2
    parts = torch.tensor([[1.0, 5.0], [3.0, 5.0], [2.0, 0.0], [6.0, 1.0]], dtype=F64)
    a, b, c = 1 / (math.sqrt(2) + 1e-6), 2 / (math.sqrt(8) + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)
    advantages, returns = gdpo(REWARDS, MASK, GROUPS, parts, part_weights=(1.0, 2.0))
    torch.testing.assert_close(advantages, whitened(spread(-a, a, -b - 2 * c, b + 2 * c), MASK))
    torch.testing.assert_close(returns, spread(1.0, 3.0, 2.0, 6.0))
    advantages, _ = gdpo(REWARDS, MASK, GROUPS, parts, norm_by_std=False)
    torch.testing.assert_close(advantages, whitened(spread(-1.0, 1.0, -2.5, 2.5), MASK))


def test_gdpo_ignores_the_rewards_that_a_row_lacks():
    # Of the three rows, two have r_2: 1, 3.  Without std: r_1 gives -2, 0, 2, and r_2 gives -1, 0, 1
    rewards, mask = torch.zeros(3, 1, dtype=F64), torch.ones(3, 1, dtype=torch.bool)
    parts = torch.tensor([[0.0, 1.0], [2.0, NAN], [4.0, 3.0]], dtype=F64)
    advantages, _ = gdpo(rewards, mask, torch.zeros(3, dtype=torch.int64), parts, norm_by_std=False)
    torch.testing.assert_close(advantages, whitened(torch.tensor([[-3.0], [0.0], [3.0]], dtype=F64), mask))


def test_gdpo_separates_rows_whose_sums_are_equal():
    # Sums 1, 1, 0: GRPO cannot distinguish the first two rows. Half of the rows have r_1, a quarter r_2
    parts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]], dtype=F64)
    mask, groups = torch.ones(4, 1, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    advantages, _ = gdpo(parts.sum(1, keepdim=True), mask, groups, parts)
    assert advantages[1] > advantages[0] > advantages[3]


# Three episodes of a group with the turns (1, 2), (0.5, 1) and (3), and one of another group. Tokens between turns were
# not sampled, and their rewards do not count.
TURNS = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.bool)
TURN_REWARDS = torch.tensor([[0, 1.0, 9, 2], [0.5, NAN, 0, 1], [3, 9, 9, 9], [1, 0, 9, 0]], dtype=F64)


@pytest.mark.parametrize(
    ("gamma", "norm_by_std", "first", "second", "returns"),
    [
        # The means are 2.5 and 1.5. A turn that no other episode has is not compared.
        (1.0, False, [0.5, -1, 0.5], [0.5, -0.5], [[3, 2], [1.5, 1], [3], [1, 0]]),
        # 1 + 2 / 2 = 2, 0.5 + 1 / 2 = 1 and 3 have the mean 2 and the std 1; 2 and 1 have 1.5 and 0.5 ** 0.5.
        (0.5, True, [0, -1, 1], [0.5**0.5, -(0.5**0.5)], [[2, 2], [1, 1], [3], [1, 0]]),
    ],
)
def test_turn_return_by_hand(gamma, norm_by_std, first, second, returns):
    advantages, totals = turn_return(
        TURN_REWARDS, TURNS, torch.tensor([0, 0, 0, 1]), gamma=gamma, norm_by_std=norm_by_std
    )
    (a, b, c), (d, e) = first, second
    expected = torch.tensor([[a, a, 0, d], [b, 0, e, e], [c, 0, 0, 0], [0, 0, 0, 0]], dtype=F64)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-9)
    (f, g), (h, i), (j,), (k, m) = returns
    expected = torch.tensor([[f, f, 0, g], [h, 0, i, i], [j, 0, 0, 0], [k, k, 0, m]], dtype=F64)
    torch.testing.assert_close(totals, expected)


def test_gpg_by_hand():
    # One of four rows has R != 0, alpha = 4;  group 0: R = 0, 2, mean 1;  group 1: R = 0, 0
    rewards, groups = torch.tensor([[0.0], [2.0], [0.0], [0.0]], dtype=F64), torch.tensor([0, 0, 1, 1])
    mask = torch.ones(4, 1, dtype=torch.bool)
    advantages, returns = gpg(rewards, mask, groups)
    torch.testing.assert_close(advantages, torch.tensor([[-4.0], [4.0], [0.0], [0.0]], dtype=F64))
    torch.testing.assert_close(returns, rewards)
    mask[3] = False  # a dropped row does not count: alpha = 3
    torch.testing.assert_close(gpg(rewards, mask, groups)[0][:2, 0], torch.tensor([-3.0, 3.0], dtype=F64))
    assert not gpg(rewards * 0, mask, groups)[0].any()


def test_maxrl_by_hand():
    # group 7: mean 2;  group 3: mean 4
    a, b = 2 + 1e-6, 4 + 1e-6
    advantages, returns = maxrl(REWARDS, MASK, GROUPS)
    torch.testing.assert_close(advantages, spread(-1 / a, 1 / a, -2 / b, 2 / b))
    torch.testing.assert_close(returns, spread(1.0, 3.0, 2.0, 6.0))


@pytest.mark.parametrize("rewards", [[0.0, 0.0, 0.0], [-1.0, -1.0, 1.0], [-1.0, 0.0, 1.0]])
def test_maxrl_is_0_in_groups_without_a_positive_mean(rewards):
    grid, mask = torch.tensor(rewards, dtype=F64)[:, None], torch.ones(3, 1, dtype=torch.bool)
    advantages, _ = maxrl(grid, mask, torch.zeros(3, dtype=torch.int64))
    assert not advantages.any()


def test_optimal_token_baseline_by_hand():
    # Tokens have pi = 1/2, 1/4 and sum_v pi(v)^2 = 1/2, 3/8, so each term of W is 1/2 or 7/8.
    rewards = torch.tensor([[0.0, 2.0, NAN], [1.0, 0.0, 3.0]], dtype=F64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    log_probs = torch.tensor([[1 / 2, 1 / 4, NAN], [1 / 4, 1 / 2, 1 / 2]], dtype=F64).log()
    squares = torch.tensor([[1 / 2, 3 / 8, NAN], [3 / 8, 1 / 2, 1 / 2]], dtype=F64)
    # G = (2, 2), (4, 3, 3);  W = (4/8, 11/8), (7/8, 11/8, 15/8)
    # b_1 = (2 * 4 + 4 * 7) / 11 = 36/11, b_2 = 5/2;  only the second row reaches the third token, b_3 = 0
    groups = torch.zeros(2, dtype=torch.int64)
    advantages, returns = optimal_token_baseline(rewards, mask, groups, log_probs, squares)
    expected = torch.tensor([[2 - 36 / 11, -0.5, 0.0], [4 - 36 / 11, 0.5, 3.0]], dtype=F64)
    torch.testing.assert_close(advantages, expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(returns, torch.tensor([[2.0, 2.0, 0.0], [4.0, 3.0, 3.0]], dtype=F64))
    # Importance weights 2 and 1: W = (4 * 4/8, 4 * 11/8), (7/8, ...): b_1 = (2 * 16 + 4 * 7) / 23
    weights = torch.tensor([[2.0, 2.0, NAN], [1.0, 1.0, 1.0]], dtype=F64)
    advantages, _ = optimal_token_baseline(rewards, mask, groups, log_probs, squares, weights)
    expected = torch.tensor([2 - 60 / 23, 2 - (2 * 4 + 3) / 5], dtype=F64)
    torch.testing.assert_close(advantages[0, :2], expected, rtol=1e-7, atol=1e-7)


def test_turns_of_different_lengths_are_compared_by_sampled_tokens():
    # The first row has a tool token at the second position, so its second sampled token is at the third.
    rewards = torch.tensor([[0.0, NAN, 1.0], [0.0, 3.0, NAN]], dtype=F64)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    log_probs = torch.where(mask, torch.full((2, 3), 0.5, dtype=F64).log(), NAN)
    squares = torch.where(mask, 0.5, NAN).double()
    groups = torch.zeros(2, dtype=torch.int64)
    advantages, returns = tir_optimal_token_baseline(rewards, mask, groups, log_probs, squares)
    # All terms of W are 1/2, so both baselines are the mean of G = 1 and 3.
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 0.0, -1.0], [1.0, 1.0, 0.0]], dtype=F64))
    torch.testing.assert_close(returns, torch.tensor([[1.0, 0.0, 1.0], [3.0, 3.0, 0.0]], dtype=F64))
    # By position, each row is alone after its first token.
    advantages, _ = optimal_token_baseline(rewards, mask, groups, log_probs, squares)
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 0.0, 1.0], [1.0, 3.0, 0.0]], dtype=F64))


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("p", [1.0, 0.3])
def test_equal_rewards_have_no_advantage_with_a_token_baseline(name, p):
    """The weights of tokens with probability 1 are 0; the baseline is then the mean."""
    rewards = torch.tensor([[0.0, 0.1], [0.0, 0.1], [0.1, 0.0]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    filled = torch.full((3, 2), p)
    inputs = AdvantageInputs(
        rewards, mask, groups=torch.zeros(3, dtype=torch.int64), old_log_probs=filled.log(), sum_pi_squared=filled**2
    )
    advantages, _ = ESTIMATORS[name](inputs, AdvantageOptions())
    assert not advantages.any()


def test_the_token_baseline_minimizes_the_variance_of_the_gradient():
    """For one token of three, no other baseline gives a smaller E |(R - b) d log pi / d logits|^2."""
    p, reward = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    squared_norms = (torch.eye(3, dtype=F64) - p).square().sum(1)
    torch.testing.assert_close(squared_norms, 1 - 2 * p + p.square().sum())
    # Tokens in proportion to their probabilities: five, three and two rows of one group
    tokens = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    grids = [grid[tokens][:, None] for grid in (reward, p.log(), p.square().sum().expand(3))]
    mask, groups = torch.ones(10, 1, dtype=torch.bool), torch.zeros(10, dtype=torch.int64)
    advantages, _ = optimal_token_baseline(grids[0], mask, groups, *grids[1:])
    baseline = float(reward[0] - advantages[0, 0])

    def second_moment(b):
        return float((p * (reward - b).square() * squared_norms).sum())

    assert second_moment(baseline) <= min(second_moment(baseline + change) for change in (-1e-3, 1e-3))
    assert second_moment(baseline) < second_moment(float((p * reward).sum()))  # the mean


def expected_gradient(estimator, count, p):
    """Return E[sum_i A_i d log pi(y_i) / d p] over all outcomes of `count` Bernoulli(p) responses with R = y."""
    mask, groups, total = torch.ones(count, 1, dtype=torch.bool), torch.zeros(count, dtype=torch.int64), 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=count):
        advantages, _ = estimator(torch.tensor(outcome, dtype=F64)[:, None], mask, groups)
        probability = math.prod(p if y else 1 - p for y in outcome)
        scores = [1 / p if y else -1 / (1 - p) for y in outcome]
        total += probability * math.fsum(a * s for a, s in zip(advantages[:, 0].tolist(), scores, strict=True))
    return total


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_pass_at_k_follows_the_gradient_of_the_best_reward(p):
    # d/dp (1 - (1 - p)^k)
    gradient = expected_gradient(partial(grpo_passk, norm_by_std=False), 4, p)
    assert gradient == pytest.approx(4 * (1 - p) ** 3)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_maxrl_follows_the_gradient_of_the_log_likelihood(p):
    # log p = -sum_k (1 - p)^k / k; the terms up to k = n - 1 of n rows
    gradient = expected_gradient(maxrl, 5, p) / 5
    assert gradient == pytest.approx(sum((1 - p) ** k for k in range(4)), rel=1e-4)


@pytest.mark.parametrize("fn", [grpo, rloo, opo, grpo_passk, gpg, maxrl])
def test_a_group_of_one_has_no_baseline(fn):
    rewards = torch.tensor([[5.0], [1.0], [3.0]], dtype=F64)
    advantages, _ = fn(rewards, torch.ones(3, 1, dtype=torch.bool), torch.tensor([9, 4, 4]))
    torch.testing.assert_close(advantages[0, 0], torch.tensor(5.0, dtype=F64), rtol=1e-5, atol=0)


def test_rows_without_a_counted_token_give_zeros():
    mask = MASK.clone()
    mask[1] = False
    for name, estimator in ESTIMATORS.items():
        advantages, returns = estimator(inputs_of(REWARDS, mask), AdvantageOptions())
        assert (advantages[1] == 0).all(), name
        assert (returns[1] == 0).all(), name
        assert advantages.isfinite().all(), name


# -- one calling convention -----------------------------------------------------------------------------


def inputs_of(rewards, mask, rows=slice(None)):
    """Return all inputs that an estimator can need; values and baselines are derived from the rewards."""
    clean = torch.where(mask, rewards, 0.0)
    return AdvantageInputs(
        rewards[rows],
        mask[rows],
        values=torch.where(mask, clean / 2 + 0.25, NAN)[rows],
        groups=GROUPS[rows] if len(rewards) == len(GROUPS) else (torch.arange(len(rewards)) // 2)[rows],
        baselines=(clean.sum(1) / 3)[rows],
        reward_parts=torch.stack([clean.sum(1), clean.sum(1).square() / 4], dim=1)[rows],
        old_log_probs=torch.where(mask, -clean.abs() - 0.5, NAN)[rows],
        sum_pi_squared=torch.where(mask, 0.75, NAN).to(rewards.dtype)[rows],
    )


def test_names_match_the_config():
    assert set(ESTIMATORS) == {
        "gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo",
        "grpo_passk", "gdpo", "turn_return", "gpg", "maxrl", "optimal_token_baseline", "tir_optimal_token_baseline",
    }  # fmt: skip


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_fail_without_their_inputs(name):
    estimator, bare = ESTIMATORS[name], AdvantageInputs(REWARDS, MASK)
    missing = {"gae": "values", "remax": "baselines", "reinforce_plus_plus": None}.get(name, "groups")
    if missing is None:
        estimator(bare, AdvantageOptions())
        return
    with pytest.raises(ValueError, match=f"`{missing}`"):
        estimator(bare, AdvantageOptions())


def test_options_reach_the_formulas():
    inputs: Any = inputs_of(REWARDS, MASK)
    options = AdvantageOptions(gamma=0.5, lam=0.25, norm_by_std=False, part_weights=(1.0, 3.0))
    parts = inputs.reward_parts
    expected = {
        "gae": gae(REWARDS, inputs.values, MASK, gamma=0.5, lam=0.25),
        "grpo": grpo(REWARDS, MASK, GROUPS, norm_by_std=False),
        "reinforce_plus_plus": reinforce_plus_plus(REWARDS, MASK, gamma=0.5),
        "grpo_passk": grpo_passk(REWARDS, MASK, GROUPS, norm_by_std=False),
        "turn_return": turn_return(REWARDS, MASK, GROUPS, gamma=0.5, norm_by_std=False),
        "gdpo": gdpo(REWARDS, MASK, GROUPS, parts, part_weights=(1.0, 3.0), norm_by_std=False),
    }
    for name, (advantages, returns) in expected.items():
        actual = ESTIMATORS[name](inputs, options)
        assert torch.equal(actual[0], advantages), name
        assert torch.equal(actual[1], returns), name


# -- comparison with loops --------------------------------------------------------------------------------


def loop_gae(rewards, values, mask, gamma, lam):
    """Return GAE of rows that are Python lists of the counted tokens."""
    raw = torch.zeros_like(rewards)
    for i in range(len(rewards)):
        kept = [t for t in range(rewards.shape[1]) if mask[i, t]]
        for k, start in enumerate(kept):
            total, factor = 0.0, 1.0
            for position, t in enumerate(kept[k:], start=k):
                after = values[i, kept[position + 1]] if position + 1 < len(kept) else 0.0
                total += factor * (rewards[i, t] + gamma * after - values[i, t])
                factor *= gamma * lam
            raw[i, start] = total
    return whitened(raw, mask), torch.where(mask, raw + values, 0.0)


def loop_group(name, rewards, mask, groups):
    totals = [
        sum(r for r, m in zip(rs, ms, strict=True) if m) for rs, ms in zip(rewards.tolist(), mask.tolist(), strict=True)
    ]
    lengths = mask.sum(1).tolist()
    result = []
    for i, group in enumerate(groups.tolist()):
        members = [j for j, other in enumerate(groups.tolist()) if other == group]
        alone = len(members) == 1
        mean = 0.0 if alone else statistics.fmean(totals[j] for j in members)
        if name == "grpo":
            std = 1.0 if alone else statistics.stdev([totals[j] for j in members])
            result.append((totals[i] - mean) / (std + 1e-6))
        elif name == "rloo":
            others = [totals[j] for j in members if j != i]
            result.append(totals[i] - (statistics.fmean(others) if others else 0.0))
        elif name == "grpo_passk":
            others = [totals[j] for j in members if j != i]
            std = 1.0 if alone else statistics.stdev([totals[j] for j in members])
            best = max(totals[j] for j in members)
            result.append((best - (max(others) if others else 0.0)) / (std + 1e-6))
        elif name == "gpg":
            rows = [j for j in range(len(totals)) if lengths[j]]
            alpha = len(rows) / max(sum(totals[j] != 0 for j in rows), 1)
            result.append(alpha * (totals[i] - mean))
        elif name == "maxrl":
            normalized = (totals[i] - mean) / (mean + 1e-6) if mean > 0 else 0.0
            result.append(totals[i] if alone else normalized)
        elif name == "opo":
            weighed = sum(lengths[j] * totals[j] for j in members) / max(sum(lengths[j] for j in members), 1)
            result.append(totals[i] - (0.0 if alone else weighed))
        else:
            result.append(totals[i] - mean)
    grid = torch.where(mask, torch.tensor(result, dtype=F64)[:, None], 0.0)
    return whitened(grid, mask) if name == "reinforce_plus_plus_baseline" else grid


def loop_gdpo(batch, weights):
    """Return the sum of GRPO of each reward over the rows that have it, whitened."""
    total = torch.zeros(batch.mask.shape, dtype=F64)
    for k, weight in enumerate(weights):
        rows = [i for i, part in enumerate(batch.reward_parts[:, k].tolist()) if part == part]
        column = torch.zeros(batch.mask.shape, dtype=F64)
        column[:, 0] = batch.reward_parts[:, k]
        first = torch.zeros_like(batch.mask)
        first[:, 0] = True
        terms = loop_group("grpo", column[rows], first[rows], batch.groups[rows])
        total[rows] += weight * terms[:, :1]
    grid = torch.where(batch.mask, total, 0.0)
    return torch.zeros_like(grid) if len(set(grid[batch.mask].tolist())) == 1 else whitened(grid, batch.mask)


@st.composite
def batches(draw):
    """Draw rewards on a coarse lattice (so that groups have ties), and any mask with at least two tokens."""
    num_rows, width = draw(st.integers(1, 6)), draw(st.integers(2, 6))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(-4, 5, (num_rows, width), generator=generator).to(F64) / 4
    mask = torch.rand(num_rows, width, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    mask[0, :2] = True
    values = torch.randn(num_rows, width, dtype=F64, generator=generator)
    groups = torch.randint(0, 3, (num_rows,), generator=generator) * 5 - 3
    baselines = torch.randn(num_rows, dtype=F64, generator=generator)
    parts = torch.randint(-2, 3, (num_rows, 2), generator=generator).to(F64) / 2
    parts[torch.rand(num_rows, 2, generator=generator) < 0.2] = NAN
    log_probs = -torch.rand(num_rows, width, dtype=F64, generator=generator) * 3
    squares = log_probs.exp().square() + 0.1
    weights = torch.rand(num_rows, width, dtype=F64, generator=generator) * 2
    return AdvantageInputs(rewards, mask, values, groups, baselines, parts, log_probs, squares, weights)


@given(batches(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_is_the_double_sum_of_the_paper(batch, gamma, lam):
    expected = loop_gae(batch.rewards, batch.values, batch.mask, gamma, lam)
    actual = gae(batch.rewards, batch.values, batch.mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual[1], expected[1])


LOOPS = ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "grpo_passk", "gpg", "maxrl"]


@pytest.mark.parametrize("name", LOOPS)
@given(batch=batches())
def test_group_estimators_match_a_loop_over_rows(name, batch):
    advantages, _ = ESTIMATORS[name](batch, AdvantageOptions())
    expected = loop_group(name, batch.rewards, batch.mask, batch.groups)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


@given(batches(), st.sampled_from([(1.0, 1.0), (0.25, 2.0), (0.0, -1.0)]))
def test_gdpo_matches_a_loop_over_rewards(batch, weights):
    advantages, _ = ESTIMATORS["gdpo"](batch, AdvantageOptions(part_weights=weights))
    torch.testing.assert_close(advantages, loop_gdpo(batch, weights), rtol=1e-6, atol=1e-6)


def loop_token_baseline(batch, by_sampled_tokens):
    """Return returns minus weighted means over the rows at the same position, from Python lists of tokens."""
    tokens = []
    for i, row_mask in enumerate(batch.mask.tolist()):
        positions = [t for t, is_sampled in enumerate(row_mask) if is_sampled]
        weight, row = 0.0, {}
        for index, t in enumerate(positions):
            pi = math.exp(batch.old_log_probs[i, t])
            term = 1 - 2 * pi + float(batch.sum_pi_squared[i, t])
            weight += float(batch.importance_weights[i, t]) ** 2 * term
            to_go = math.fsum(float(batch.rewards[i, s]) for s in positions[index:])
            row[index if by_sampled_tokens else t] = (t, to_go, weight)
        tokens.append(row)
    result = torch.zeros(batch.mask.shape, dtype=F64)
    groups = batch.groups.tolist()
    for i, row in enumerate(tokens):
        for position, (t, to_go, _) in row.items():
            others = [other[position] for j, other in enumerate(tokens) if groups[j] == groups[i] and position in other]
            total = math.fsum(weight for *_, weight in others) + 1e-8  # if all weights are 0, the mean is the baseline
            mean = math.fsum(g for _, g, _ in others) / len(others)
            baseline = mean + math.fsum(weight * (g - mean) for _, g, weight in others) / total
            result[i, t] = to_go - (baseline if len(others) > 1 else 0.0)
    return result


@pytest.mark.parametrize(("name", "by_sampled_tokens"), [("", False), ("tir_", True)])
@given(batch=batches())
def test_token_baselines_match_a_loop_over_positions(name, by_sampled_tokens, batch):
    advantages, _ = ESTIMATORS[f"{name}optimal_token_baseline"](batch, AdvantageOptions())
    torch.testing.assert_close(advantages, loop_token_baseline(batch, by_sampled_tokens), rtol=1e-6, atol=1e-6)


# -- invariances --------------------------------------------------------------------------------------------

OPTIONS = AdvantageOptions(gamma=0.9, lam=0.8)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=batches(), padding=st.integers(0, 4), junk=st.sampled_from([NAN, math.inf, -1e30]))
def test_padding_and_masked_values_do_not_matter(name, batch, padding, junk):
    width = batch.mask.shape[1]

    def spoil(grid):
        spoilt = torch.where(batch.mask, grid, junk)
        return torch.cat([spoilt, torch.full((len(grid), padding), junk, dtype=grid.dtype)], dim=1)

    mask = torch.cat([batch.mask, torch.zeros(len(batch.mask), padding, dtype=torch.bool)], dim=1)
    grids = {name: grid for name, grid in vars(batch).items() if grid.shape == batch.mask.shape and name != "mask"}
    grids.pop("reward_parts", None)
    spoilt = replace(batch, mask=mask, **{name: spoil(grid) for name, grid in grids.items()})
    for expected, actual in zip(ESTIMATORS[name](batch, OPTIONS), ESTIMATORS[name](spoilt, OPTIONS), strict=True):
        torch.testing.assert_close(actual[:, :width], expected)
        assert (actual[~mask] == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_rows_may_come_in_any_order(name, batch, seed):
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    shuffled = AdvantageInputs(**{name: tensor[order] for name, tensor in vars(batch).items()})
    for expected, actual in zip(ESTIMATORS[name](batch, OPTIONS), ESTIMATORS[name](shuffled, OPTIONS), strict=True):
        torch.testing.assert_close(actual, expected[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_results_match_the_rewards_in_dtype_and_shape(name):
    batch: Any = inputs_of(REWARDS.float(), MASK)
    inputs = replace(batch, values=batch.values.requires_grad_())
    for grid in ESTIMATORS[name](inputs, AdvantageOptions()):
        assert grid.dtype == torch.float32
        assert grid.shape == MASK.shape
        assert not grid.requires_grad


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "grpo_passk", "gpg", "maxrl"])
def test_names_of_groups_do_not_matter(name):
    renamed = AdvantageInputs(REWARDS, MASK, groups=torch.tensor([-(2**40), -(2**40), 2**40, 2**40]))
    expected = ESTIMATORS[name](inputs_of(REWARDS, MASK), OPTIONS)
    torch.testing.assert_close(ESTIMATORS[name](renamed, OPTIONS), expected)
