"""Losses: hand-worked numbers, sums over any split into micro-batches, and gradients."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.algorithms import (
    AGGREGATIONS,
    POLICY_LOSSES,
    Clip,
    Counts,
    aggregate,
    entropy_loss,
    kl_loss,
    policy_loss,
    sft_loss,
    value_loss,
)
from camshaft.ragged import Ragged

NAN = float("nan")
F64 = torch.float64
CLIP = Clip(low=0.2, high=0.3, dual=3.0)
MODES = tuple(AGGREGATIONS)


def counts_of(mask, lengths, horizon: float | None = 10.0):
    """Return the counts of a mini-batch that is one micro-batch."""
    rows = mask.split(list(lengths))
    return Counts(mask, torch.tensor(lengths), float(mask.sum()), float(sum(bool(r.any()) for r in rows)), horizon)


# Rows (1, 2), (4, -), (-) where - is masked: 3 tokens, 2 sequences with a counted token.
PER_TOKEN = torch.tensor([1.0, 2.0, 4.0, NAN, NAN], dtype=F64)
COUNTS = counts_of(torch.tensor([True, True, True, False, False]), (2, 2, 1))


# -- aggregation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 7 / 3),  # (1 + 2 + 4) / 3 tokens
        ("token-sum", 7),
        ("seq-mean-token-sum", 7 / 2),  # (3 + 4) / 2 sequences
        ("seq-mean-token-mean", (1.5 + 4) / 2),
        ("seq-mean-token-sum-norm", 7 / 2 / 10),  # horizon 10
    ],
)
def test_aggregations_by_hand(mode, expected):
    torch.testing.assert_close(aggregate(PER_TOKEN, COUNTS, mode), torch.tensor(expected, dtype=F64))


def test_counts_cover_the_mini_batch():
    # the same three tokens, but the mini-batch has 12 tokens in 4 sequences
    counts = Counts(COUNTS.mask, COUNTS.lengths, num_tokens=12.0, num_sequences=4.0, horizon=10.0)
    result = [float(aggregate(PER_TOKEN, counts, mode)) for mode in MODES]
    assert result == pytest.approx([7 / 12, 7, 7 / 4, 5.5 / 4, 7 / 40])


def test_counts_of_a_mask_are_those_of_its_context():
    mask = Ragged.from_rows([[True, False], [], [True]])
    counts = Counts.of(mask, {"num_tokens": 12.0, "num_sequences": 4.0, "other": 1}, horizon=8)
    assert counts.mask is mask.values
    assert counts.lengths.tolist() == [2, 0, 1]
    assert (counts.num_tokens, counts.num_sequences, counts.horizon) == (12.0, 4.0, 8)


def test_unknown_mode_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"'mean'.*token-mean, seq-mean-token-sum"):
        aggregate(PER_TOKEN, COUNTS, "mean")


def test_norm_needs_a_horizon():
    with pytest.raises(ValueError, match="horizon"):
        aggregate(PER_TOKEN, counts_of(COUNTS.mask, (2, 2, 1), horizon=None), "seq-mean-token-sum-norm")


@pytest.mark.parametrize("mode", MODES)
def test_a_mini_batch_without_counted_tokens_has_zero_loss(mode):
    x: Any = torch.tensor([1.0, NAN], requires_grad=True)
    loss = aggregate(x, counts_of(torch.tensor([False, False]), (2,)), mode)
    loss.backward()
    assert loss == 0
    assert x.grad.tolist() == [0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_without_rows_has_no_share(mode):
    counts = Counts(torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64), 3.0, 2.0, horizon=10.0)
    assert aggregate(torch.zeros(0), counts, mode) == 0


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_gradients(mode):
    x = torch.randn(5, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: aggregate(v, COUNTS, mode), x)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_a_masked_token_is_exactly_zero(mode):
    x: Any = PER_TOKEN.clone().requires_grad_()
    aggregate(x, COUNTS, mode).backward()
    assert x.grad[3:].tolist() == [0, 0]
    assert (x.grad[:3] > 0).all()


# -- shares -----------------------------------------------------------------------------------------------


@st.composite
def mini_batches(draw):
    """Draw rows with a mask, six columns of numbers, and a split into micro-batches of consecutive rows."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n = sum(lengths)
    mask = torch.rand(n, generator=generator) < 0.7
    columns = torch.randn(6, n, dtype=F64, generator=generator)
    cuts = sorted(draw(st.sets(st.integers(1, len(lengths)), max_size=3)) | {0, len(lengths)})
    return lengths, mask, columns, cuts


def all_losses(columns, counts, mode):
    """Return every loss and metric as one flat list of shares, the losses first."""
    a, b, c, d, e, f = columns
    extra = {"dro": {"dro_beta": 0.7}, "clip_cov": {"selected": e > 0}, "kl_cov": {"penalties": f.detach().abs()}}
    functions = [partial(loss, **extra.get(name, {})) for name, loss in POLICY_LOSSES.items()]
    policies = [loss(a, b, c, counts, clip=CLIP, mode=mode) for loss in functions]
    weighted = [loss(a, b, c, counts, clip=CLIP, mode=mode, weights=d.abs())[0] for loss in functions]
    value, value_metrics = value_loss(d, e, f, counts, cliprange=0.5, mode=mode)
    others = [
        entropy_loss(d, counts, mode=mode),
        kl_loss(a, b, counts, kind="low_var_kl", mode=mode),
        sft_loss(a, counts),
        aggregate(f, counts, mode),
    ]
    policy_metrics = [share for _, metrics in policies for share in metrics.values()]
    return [*(loss for loss, _ in policies), *weighted, value, *others, *policy_metrics, *value_metrics.values()]


TRAINED = 2 * len(POLICY_LOSSES) + 4
"""Number of losses that are differentiated: up to the supervised loss."""


def cut(mini_batch):
    """Return (columns, Counts) of each micro-batch, with the counts of the mini-batch."""
    lengths, mask, columns, cuts = mini_batch
    total_counts = counts_of(mask, lengths)
    ends = [sum(lengths[:row]) for row in cuts]
    for first, last, start, stop in zip(cuts, cuts[1:], ends, ends[1:], strict=False):
        counts = Counts(
            mask[start:stop],
            torch.tensor(lengths[first:last]),
            total_counts.num_tokens,
            total_counts.num_sequences,
            total_counts.horizon,
        )
        yield columns[:, start:stop], counts


@pytest.mark.parametrize("mode", MODES)
@given(mini_batch=mini_batches())
def test_shares_of_micro_batches_add_up_for_any_split(mode, mini_batch):
    lengths, mask, columns, _ = mini_batch
    full = all_losses(columns, counts_of(mask, lengths), mode)
    parts = [all_losses(part, counts, mode) for part, counts in cut(mini_batch)]
    for expected, *shares in zip(full, *parts, strict=True):
        torch.testing.assert_close(sum(share.double() for share in shares), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(mini_batch=mini_batches())
def test_accumulated_gradients_do_not_depend_on_the_split(mode, mini_batch):
    lengths, mask, columns, cuts = mini_batch

    def gradient(cuts):
        leaf = columns.clone().requires_grad_()
        for part, counts in cut((lengths, mask, leaf, cuts)):
            total: Any = sum(all_losses(part, counts, mode)[:TRAINED])
            total.backward()
        return leaf.grad

    torch.testing.assert_close(gradient(cuts), gradient([0, len(lengths)]))


@pytest.mark.parametrize("mode", MODES)
@given(mini_batch=mini_batches(), junk=st.sampled_from([NAN, math.inf, -math.inf, 1e30]))
def test_values_at_masked_tokens_do_not_matter(mode, mini_batch, junk):
    lengths, mask, columns, _ = mini_batch
    counts = counts_of(mask, lengths)
    spoilt: Any = torch.where(mask, columns, junk).requires_grad_()
    actual = all_losses(spoilt, counts, mode)
    for expected, value in zip(all_losses(columns, counts, mode), actual, strict=True):
        torch.testing.assert_close(value, expected)
    total: Any = sum(actual[:TRAINED])
    total.backward()
    assert (spoilt.grad[:, ~mask] == 0).all()


@pytest.mark.parametrize("mode", MODES)
@given(mini_batch=mini_batches(), seed=st.integers(0, 1000))
def test_rows_may_come_in_any_order(mode, mini_batch, seed):
    lengths, mask, columns, _ = mini_batch
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    tokens = torch.arange(len(mask)).split(lengths)
    index = torch.cat([tokens[row] for row in order])
    shuffled = counts_of(mask[index], [lengths[row] for row in order])
    for expected, actual in zip(
        all_losses(columns, counts_of(mask, lengths), mode), all_losses(columns[:, index], shuffled, mode), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_losses_and_metrics_are_tensors_of_one_number():
    for value in all_losses(torch.zeros(6, 5), COUNTS, "token-mean"):
        assert isinstance(value, torch.Tensor)
        assert value.shape == ()
        assert value.dtype == torch.float32


# -- policy -------------------------------------------------------------------------------------------------


def one_token(ratio, advantage):
    """Return the loss and metrics of a single token with this ratio and advantage."""
    counts = counts_of(torch.tensor([True]), (1,))
    log_probs, old = torch.tensor([math.log(ratio)], dtype=F64), torch.zeros(1, dtype=F64)
    loss, metrics = policy_loss(
        log_probs, old, torch.tensor([advantage], dtype=F64), counts, clip=CLIP, mode="token-mean"
    )
    return float(loss), {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "lower"),
    [
        # the ratio may move within [0.8, 1.3]; the dual clip is 3
        (1.0, 2.0, -2.0, 0, 0),
        (1.2, 2.0, -2.4, 0, 0),  # above 1 + low, within 1 + high
        (1.5, 2.0, -2.6, 1, 0),  # max(-3, -2 * 1.3)
        (0.5, 2.0, -1.0, 0, 0),  # max(-1, -1.6): no bonus for moving back
        (0.5, -2.0, 1.6, 1, 0),  # max(1, 2 * 0.8)
        (2.0, -2.0, 4.0, 0, 0),  # max(4, 2.6), below 2 * 3
        (5.0, -2.0, 6.0, 0, 1),  # max(10, 2.6), but at most 2 * 3
        (5.0, 0.0, 0.0, 0, 0),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss, clipped, lower):
    actual, metrics = one_token(ratio, advantage)
    assert actual == pytest.approx(loss)
    assert metrics["pg_clipfrac"] == clipped
    assert metrics["pg_clipfrac_lower"] == lower
    assert metrics["ppo_kl"] == pytest.approx(-math.log(ratio), abs=1e-6)


def test_policy_metrics_are_means_over_tokens():
    # ratios 1.5 (clipped), 1, 5 (dual): clipped 1/3, dual 1/3, KL -(log 1.5 + 0 + log 5) / 3
    counts = counts_of(torch.tensor([True, True, True]), (2, 1))
    log_probs = torch.tensor([1.5, 1.0, 5.0], dtype=F64).log()
    advantages = torch.tensor([1.0, 1.0, -1.0], dtype=F64)
    loss, metrics = policy_loss(
        log_probs, torch.zeros(3, dtype=F64), advantages, counts, clip=CLIP, mode="seq-mean-token-sum"
    )
    assert float(loss) == pytest.approx((-1.3 - 1.0 + 3.0) / 2)
    assert float(metrics["pg_clipfrac"]) == pytest.approx(1 / 3)
    assert float(metrics["pg_clipfrac_lower"]) == pytest.approx(1 / 3)
    assert float(metrics["ppo_kl"]) == pytest.approx(-math.log(7.5) / 3)


def test_a_huge_difference_does_not_overflow():
    counts = counts_of(torch.tensor([True, True]), (2,))
    log_probs: Any = torch.tensor([500.0, -500.0], requires_grad=True)
    loss, metrics = policy_loss(
        log_probs, torch.zeros(2), torch.tensor([-1.0, 1.0]), counts, clip=CLIP, mode="token-mean"
    )
    loss.backward()
    # token 0: dual clip, 3; token 1: -exp(-20)
    assert loss.item() == pytest.approx((3 - math.exp(-20)) / 2)
    assert log_probs.grad.tolist() == [0, 0]
    assert float(metrics["ppo_kl"]) == 0  # (-20 + 20) / 2


def test_first_step_on_policy_is_the_policy_gradient():
    log_probs = torch.tensor([-1.0, -2.0, -0.5], dtype=F64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    counts = counts_of(torch.tensor([True, True, True]), (3,))
    loss, _ = policy_loss(log_probs, log_probs.detach(), advantages, counts, clip=CLIP, mode="token-mean")
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -advantages / 3)


def test_weights_multiply_the_clipped_loss_and_have_no_gradient():
    # Ratios 1.5 and 0.9 for A = 2, -1: clipped losses -2.6 and 0.9; weights 0.5 and 3; a third token does not count.
    log_probs: Any = torch.tensor([math.log(1.5), math.log(0.9), NAN], dtype=F64, requires_grad=True)
    weights = torch.tensor([0.5, 3.0, NAN], dtype=F64, requires_grad=True)
    counts = counts_of(torch.tensor([True, True, False]), (3,))
    advantages = torch.tensor([2.0, -1.0, NAN], dtype=F64)
    old = torch.zeros(3, dtype=F64)
    loss, metrics = policy_loss(log_probs, old, advantages, counts, clip=CLIP, mode="token-mean", weights=weights)
    assert loss.item() == pytest.approx((0.5 * -2.6 + 3 * 0.9) / 2)
    loss.backward()
    assert weights.grad is None
    assert log_probs.grad.tolist() == pytest.approx([0, 3 * 0.9 / 2, 0])
    unweighted = policy_loss(log_probs, old, advantages, counts, clip=CLIP, mode="token-mean")[1]
    assert metrics == unweighted  # the clipping metrics ignore the weights


def test_policy_gradients_match_finite_differences():
    # ratios away from every kink: 0.5, 1.1, 2, 5 with either sign of A
    ratios = torch.tensor([0.5, 1.1, 2.0, 5.0] * 2, dtype=F64)
    advantages = torch.tensor([1.0] * 4 + [-1.0] * 4, dtype=F64)
    counts = counts_of(torch.tensor([True] * 7 + [False]), (3, 5))
    log_probs = ratios.log().requires_grad_()

    def loss(x):
        return policy_loss(x, torch.zeros_like(x), advantages, counts, clip=CLIP, mode="seq-mean-token-mean")[0]

    assert torch.autograd.gradcheck(loss, log_probs)


def test_vanilla_is_the_policy_loss():
    assert POLICY_LOSSES["vanilla"] is policy_loss


# -- value ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [
        (1.0, 1.0, 3.0, 2.0, 0),  # (1 - 3)^2 / 2
        (2.0, 1.0, 3.0, 1.125, 1),  # moved towards R, but only 1.5 counts: (1.5 - 3)^2 / 2
        (0.0, 1.0, 3.0, 4.5, 0),  # moved away: max(9, (0.5 - 3)^2) / 2
        (1.25, 1.0, 1.25, 0.0, 0),
    ],
)
def test_value_loss_by_hand(value, old, target, loss, clipped):
    counts = counts_of(torch.tensor([True]), (1,))
    values, old_values, returns = (torch.tensor([x], dtype=F64) for x in (value, old, target))
    actual, metrics = value_loss(values, old_values, returns, counts, cliprange=0.5, mode="token-mean")
    assert float(actual) == pytest.approx(loss)
    assert float(metrics["vf_clipfrac"]) == clipped
    assert float(metrics["vpred_mean"]) == value


def test_value_gradients_match_finite_differences():
    values = torch.tensor([2.0, 0.0, 1.2, 0.7], dtype=F64, requires_grad=True)
    old, returns = torch.ones(4, dtype=F64), torch.full((4,), 3.0, dtype=F64)
    counts = counts_of(torch.tensor([True, True, True, False]), (1, 3))
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, counts, cliprange=0.5, mode="seq-mean-token-mean")[0], values
    )


# -- other losses -----------------------------------------------------------------------------------------------


def test_entropy_loss_is_the_mean_entropy():
    assert float(entropy_loss(PER_TOKEN, COUNTS, mode="token-mean")) == pytest.approx(7 / 3)


def test_kl_loss_by_hand():
    # d = (0, log 2, -log 2): k3 = (0, log 2 - 1/2, 1 - log 2), sum 1/2
    log_probs = torch.tensor([0.0, math.log(2), -math.log(2), NAN, NAN], dtype=F64)
    ref = torch.tensor([0.0, 0.0, 0.0, NAN, NAN], dtype=F64)
    loss = kl_loss(log_probs, ref, COUNTS, kind="low_var_kl", mode="token-mean")
    assert float(loss) == pytest.approx(0.5 / 3)


def test_sft_loss_is_cross_entropy():
    logits = torch.randn(5, 7, dtype=F64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 0, 6, -100, -100])
    log_probs = logits.log_softmax(-1)[torch.arange(5), labels.clamp(min=0)]
    expected = torch.nn.functional.cross_entropy(logits, labels)  # leaves out -100
    torch.testing.assert_close(sft_loss(log_probs, COUNTS), expected)
