"""Mismatch metrics, weights and rejection, compared with hand-worked numbers and a loop in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.algorithms import (
    accept_tokens,
    effective_sample_share,
    importance_weights,
    interpolated_log_probs,
    mean_importance_weight,
    mismatch,
    off_policy_diagnostics,
)

NAN = float("nan")
LENGTHS = torch.tensor([3, 2, 1])
MASK = torch.tensor([True, False, True, True, True, False])
# Training over rollout probabilities: rows (2, -, 3/4), (1/2, 1/2), (-), where - is masked.
RATIOS = torch.tensor([2, NAN, 0.75, 0.5, 0.5, NAN], dtype=torch.float64)
TRAIN = torch.full((6,), -1.0, dtype=torch.float64)
ROLLOUT = TRAIN - RATIOS.log()
FLAT = (TRAIN, ROLLOUT, MASK, LENGTHS)
RULES = [f"{scope}_{k}" for scope in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")]
RULES.remove("seq_max_k1")


def oracle(train, rollout, mask, lengths):
    """Return the rows as lists of the counted differences."""
    rows = zip(*(column.split(lengths.tolist()) for column in (train.double(), rollout.double(), mask)), strict=True)
    return [[(t - r).item() for t, r, m in zip(*row, strict=True) if m] for row in rows]


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    size = sum(lengths)
    numbers = st.lists(st.floats(-6, 0, width=32), min_size=size, max_size=size)
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return torch.tensor(draw(numbers)), torch.tensor(draw(numbers)), torch.tensor(mask), torch.tensor(lengths)


# -- metrics --------------------------------------------------------------------------------------


def test_the_report_by_hand():
    metrics = {name: float(value) for name, value in mismatch(*FLAT).items()}
    logs = [math.log(2), math.log(0.75), math.log(0.5), math.log(0.5)]
    assert metrics == pytest.approx(
        {
            "log_prob_diff_max": math.log(2),
            "log_prob_diff_mean": sum(map(abs, logs)) / 4,
            "log_prob_diff_above_0.1": 1.0,
            "kl_k1": -sum(logs) / 4,
            # exp(d) - 1 - d: the ratios less one add up to 1 - 1/4 - 1/2 - 1/2 = -1/4
            "kl_k3": (-0.25 - sum(logs)) / 4,
            # Row weights: 2 * 3/4 = 3/2 and 1/2 * 1/2 = 1/4. The row without counted tokens has none.
            "effective_sample_share": (7 / 4) ** 2 / (2 * (9 / 4 + 1 / 16)),
        }
    )


@given(batches())
def test_the_report_matches_a_loop(batch):
    rows = oracle(*batch)
    counted = [d for row in rows for d in row] or [0.0]
    weights = [math.exp(sum(row)) for row in rows if row] or [1.0]
    expected = {
        "log_prob_diff_max": max(map(abs, counted)),
        "log_prob_diff_mean": sum(map(abs, counted)) / len(counted),
        "log_prob_diff_above_0.1": sum(abs(d) > 0.1 for d in counted) / len(counted),
        "kl_k1": -sum(counted) / len(counted),
        "kl_k3": sum(math.exp(d) - d - 1 for d in counted) / len(counted),
        "effective_sample_share": sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)),
    }
    metrics = {name: float(value) for name, value in mismatch(*batch).items()}  # of float32
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_small_differences_in_float32_are_not_lost_to_rounding():
    # 2^-20 and -2^-21 are exact in float32 next to -1; d^2 / 2 of them is 2^-41 and 2^-43, the next term a millionth.
    d = torch.tensor([2.0**-20, -(2.0**-21)])
    train = torch.full((2,), -1.0)
    both = (train, train - d, torch.ones(2, dtype=torch.bool), torch.tensor([2]))
    assert float(mismatch(*both)["kl_k3"]) == pytest.approx((2.0**-41 + 2.0**-43) / 2, rel=1e-4)
    assert accept_tokens(*both, "token_k3", (0.0, 2.0**-42)).tolist() == [False, True]
    rows = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * -5
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e-6
    near = mismatch(rows, rows + noise, torch.ones(1000, dtype=torch.bool), torch.tensor([1000]))
    exact = ((rows + noise).double() - rows.double()).square().mean() / 2
    assert float(near["kl_k3"]) == pytest.approx(float(exact), rel=1e-4)


def test_metrics_are_zero_without_differences_or_counted_tokens():
    same = mismatch(TRAIN, TRAIN, MASK, LENGTHS)
    none = mismatch(TRAIN, ROLLOUT, torch.zeros_like(MASK), LENGTHS)
    for metrics in (same, none):
        assert float(metrics.pop("effective_sample_share")) == pytest.approx(1.0)
        assert [float(value) for value in metrics.values()] == [0.0] * 5


def test_effective_share_of_equal_and_degenerate_weights():
    assert float(effective_sample_share(torch.tensor([0.3, 0.3, 0.3]))) == pytest.approx(1.0)
    assert float(effective_sample_share(torch.tensor([5.0, 0.0, 0.0, 0.0]))) == pytest.approx(0.25)


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "threshold", "normalize", "expected"),
    [
        ("token", 1.5, False, [1.5, 0, 0.75, 0.5, 0.5, 0]),  # 2 is truncated
        ("token", 8.0, False, [2, 0, 0.75, 0.5, 0.5, 0]),
        ("sequence", 8.0, False, [1.5, 0, 1.5, 0.25, 0.25, 0]),  # 2 * 3/4, 1/2 * 1/2
        ("sequence", 1.25, False, [1.25, 0, 1.25, 0.25, 0.25, 0]),
        # The mean of 3/2, 3/4, 1/2 and 1/2 is 13/16; the mean over counted rows, 5/4 and 1/4, is 3/4.
        ("token", 1.5, True, [24 / 13, 0, 12 / 13, 8 / 13, 8 / 13, 0]),
        ("sequence", 1.25, True, [5 / 3, 0, 5 / 3, 1 / 3, 1 / 3, 0]),
    ],
)
def test_weights_by_hand(level, threshold, normalize, expected):
    weights = importance_weights(*FLAT, level=level, threshold=threshold, normalize=normalize)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(expected)


def test_weights_are_detached_and_finite_for_any_difference():
    train = torch.tensor([-300.0, -1.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -300.0, -1.0])
    for level in ("token", "sequence"):
        weights = importance_weights(
            train, rollout, torch.ones(3, dtype=torch.bool), torch.tensor([1, 2]), level=level, threshold=1e12
        )
        assert not weights.requires_grad
        # Clamped to exp(-20) and exp(20); a single token in a row gives the row's weight.
        assert weights[:2].log().tolist() == pytest.approx([-20, 20], rel=1e-5)


def test_an_unknown_level_is_rejected():
    with pytest.raises(ValueError, match="use token or sequence"):
        importance_weights(*FLAT, level="turn", threshold=2.0)


def test_weighted_samples_have_the_mean_of_the_other_distribution():
    # 20 000 tokens drawn from q, weighted, against the sum over p: within five standard errors.
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    value = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    drawn = torch.multinomial(q, 20_000, replacement=True, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(20_000, dtype=torch.bool)
    weights = importance_weights(
        p.log()[drawn], q.log()[drawn], ones, torch.ones(20_000, dtype=torch.int64), level="token", threshold=10.0
    )
    samples = weights.double() * value[drawn]
    error = samples.std() / len(samples) ** 0.5
    assert abs(samples.mean() - (p.double() * value).sum()) < 5 * error
    assert abs(value[drawn].mean() - (p.double() * value).sum()) > 20 * error


# -- rejection ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "bounds", "expected"),
    [
        ("token_k1", (0.6, 2.5), [1, 0, 1, 0, 0, 0]),
        ("token_k1", (0.5 - 1e-9, 1.9), [0, 0, 1, 1, 1, 0]),
        ("seq_sum_k1", (0.5, 2.0), [1, 0, 1, 0, 0, 0]),  # 3/2 and 1/4
        ("seq_mean_k1", (0.4, 1.2), [0, 0, 0, 1, 1, 0]),  # the roots: 1.2247 and 1/2
        ("seq_mean_k1", (0.4, 1.3), [1, 0, 1, 1, 1, 0]),
        # (log 2)^2 / 2 = 0.2402, (log 3/4)^2 / 2 = 0.0414
        ("token_k2", (0, 0.1), [0, 0, 1, 0, 0, 0]),
        ("seq_sum_k2", (0, 0.3), [1, 0, 1, 0, 0, 0]),  # 0.2816 and 0.4805
        ("seq_mean_k2", (0, 0.2), [1, 0, 1, 0, 0, 0]),  # 0.1408 and 0.2402
        ("seq_max_k2", (0, 0.2), [0, 0, 0, 0, 0, 0]),
        ("seq_max_k2", (0, 0.25), [1, 0, 1, 1, 1, 0]),
        # 2 - 1 - log 2 = 0.3069, 3/4 - 1 - log 3/4 = 0.0377, 1/2 - 1 + log 2 = 0.1931
        ("token_k3", (0, 0.2), [0, 0, 1, 1, 1, 0]),
        ("seq_sum_k3", (0, 0.36), [1, 0, 1, 0, 0, 0]),  # 0.3446 and 0.3863
        ("seq_mean_k3", (0, 0.18), [1, 0, 1, 0, 0, 0]),  # 0.1723 and 0.1931
        ("seq_max_k3", (0, 0.2), [0, 0, 0, 1, 1, 0]),
    ],
)
def test_rejection_by_hand(rule, bounds, expected):
    assert accept_tokens(*FLAT, rule, bounds).int().tolist() == expected


@given(batches(), st.sampled_from(RULES), st.floats(0.01, 3))
def test_rejection_matches_a_loop(batch, rule, high):
    scope, k = rule.rpartition("_")[::2]
    low, high = (1 / (1 + high), 1 + high) if k == "k1" else (0.0, high)
    estimate = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}[k]
    train, rollout, mask, lengths = batch
    mask_of_rows = accept_tokens(train, rollout, mask, lengths, rule, (low, high))
    assert not mask_of_rows[~mask].any()
    sizes = lengths.tolist()
    for row, kept, counted in zip(oracle(*batch), mask_of_rows.split(sizes), mask.split(sizes), strict=True):
        values = [estimate(d) for d in row]
        if not values:
            continue
        if scope != "token":
            reduced = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values), "seq_max": max(values)}[scope]
            values = [reduced] * len(values)
        for value, keeps in zip(values, kept[counted].tolist(), strict=True):
            size = math.exp(-value) if k == "k1" else value
            if min(abs(size - low), abs(size - high)) > 1e-9:  # not on the edge
                assert keeps == (low <= size <= high), (rule, value)


def test_an_unknown_rule_is_rejected():
    for rule in ("seq_max_k1", "token", "geometric", "token_k4"):
        with pytest.raises(ValueError, match="unknown rejection rule"):
            accept_tokens(*FLAT, rule, (0.5, 2.0))


# -- weights outside a range ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "bounds", "normalize", "expected"),
    [
        ("token", (0.5, 1.9), False, [0, 0, 0.75, 0.5, 0.5, 0]),
        ("token", (0.5, 1.9), True, [0, 0, 0.75 / (1.75 / 4), 0.5 / (1.75 / 4), 0.5 / (1.75 / 4), 0]),
        ("sequence", (0.5, 1.9), False, [1.5, 0, 1.5, 0, 0, 0]),
        ("sequence", (0.2, 1.4), True, [0, 0, 0, 2, 2, 0]),
        ("token", (5.0, 9.0), True, [0] * 6),
    ],
)
def test_weights_outside_a_range_are_zero(level, bounds, normalize, expected):
    weights = importance_weights(*FLAT, level=level, lower=bounds[0], threshold=bounds[1], normalize=normalize)
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)


@given(batches(), st.sampled_from(["token", "sequence"]), st.floats(0, 0.9))
def test_the_mean_weight_is_that_of_tokens_or_rows(batch, level, lower):
    rows = oracle(*batch)
    logs = [d for row in rows for d in row] if level == "token" else [sum(row) for row in rows if row]
    weights = [math.exp(min(max(d, -20), 20)) for d in logs]
    kept = [w if lower <= w <= 2 else 0 for w in weights] if lower > 0 else [min(w, 2) for w in weights]
    mean = sum(kept) / len(kept) if sum(kept) > 0 else 1.0
    options = {"level": level, "threshold": 2.0, "lower": lower}
    assert float(mean_importance_weight(*batch, **options)) == pytest.approx(mean)
    normalized = importance_weights(*batch, **options, normalize=True)
    expected = importance_weights(*batch, **options) / mean
    torch.testing.assert_close(normalized, expected.float(), rtol=1e-5, atol=1e-6)


# -- diagnostics ----------------------------------------------------------------------------------


def test_diagnostics_by_hand():
    # The counted rows have log-perplexity 1 under the trainer, and D = -mean d: -log(3/2) / 2 and log 2.
    values = {name: float(value) for name, value in off_policy_diagnostics(*FLAT).items()}
    gaps = [-math.log(1.5) / 2, math.log(2)]
    rollout = [1 - gap for gap in gaps]
    assert values == pytest.approx(
        {
            "training_log_ppl": 1,
            "rollout_log_ppl": sum(rollout) / 2,
            "training_ppl": math.e,
            "rollout_ppl": sum(map(math.exp, rollout)) / 2,
            "log_ppl_diff": sum(gaps) / 2,
            "log_ppl_abs_diff": sum(map(abs, gaps)) / 2,
            "log_ppl_diff_max": math.log(2),
            "log_ppl_diff_min": -math.log(1.5) / 2,
            "ppl_ratio": (1.5**-0.5 + 2) / 2,
            "chi2_token": (4 + 9 / 16 + 1 / 4 + 1 / 4) / 4 - 1,
            "chi2_seq": (9 / 4 + 1 / 16) / 2 - 1,
        }
    )


@given(batches())
def test_diagnostics_match_a_loop(batch):
    rows = [row for row in oracle(*batch) if row]
    values = off_policy_diagnostics(*batch)
    assert bool(values) == bool(rows)
    if rows:
        gaps = [-sum(row) / len(row) for row in rows]
        squares = [math.exp(2 * min(max(sum(row), -20), 20)) for row in rows]
        assert float(values["log_ppl_diff"]) == pytest.approx(sum(gaps) / len(gaps), abs=1e-9)
        assert float(values["ppl_ratio"]) == pytest.approx(sum(map(math.exp, gaps)) / len(gaps))
        assert float(values["chi2_seq"]) == pytest.approx(sum(squares) / len(squares) - 1, rel=1e-9, abs=1e-9)


def test_diagnostics_of_equal_policies():
    values = off_policy_diagnostics(TRAIN, TRAIN, MASK, LENGTHS)
    for name in ("log_ppl_diff", "log_ppl_abs_diff", "chi2_token", "chi2_seq"):
        assert values[name] == 0
    assert values["ppl_ratio"] == 1


def test_the_policy_before_the_update_is_interpolated_by_age() -> None:
    # Sampled by versions 7, 6 and 3; step 8 trains version 7 and leads to 8: 0 of 1, 1 of 2, and 4 of 5 steps.
    rollout, train = torch.tensor([-2.0, -2.0, -2.0]), torch.tensor([-1.0, -1.0, -1.5])
    estimate = interpolated_log_probs(train, rollout, torch.tensor([0, 1, 4], dtype=torch.int32))
    assert estimate.tolist() == pytest.approx([-2.0, -1.5, -1.6])
    assert estimate[0] == rollout[0]
    assert not interpolated_log_probs(train.requires_grad_(), rollout, torch.ones(3)).requires_grad
