"""Policy losses besides PPO, compared with the formulas of their papers: loops over responses and tokens, float64."""

import math
from functools import partial

import pytest
import torch

from camshaft.algorithms import (
    POLICY_LOSSES,
    Clip,
    Counts,
    cispo_loss,
    clip_cov_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    dro_loss,
    geo_mean_loss,
    gpg_loss,
    gspo_loss,
    kl_cov_loss,
    sapo_loss,
)

F64 = torch.float64
NAN = float("nan")
CLIP = Clip(low=0.2, high=0.3)
NARROW = Clip(low=0.02, high=0.03)
LENGTHS = [4, 1, 3, 2, 5]


def parameters(name, count):
    """Return the parameters without which a loss cannot be called: no token of clip_cov, all of kl_cov."""
    selected, penalties = torch.zeros(count, dtype=torch.bool), torch.full((count,), 0.1)
    extra = {"dro": {"dro_beta": 0.7}, "clip_cov": {"selected": selected}, "kl_cov": {"penalties": penalties}}
    return extra.get(name, {})


def rows(seed=0, per_row=True):
    """Return flat tokens of five rows, one without counted tokens; `per_row`: one advantage for all tokens of a row."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    log_probs = -torch.rand(count, dtype=F64, generator=generator)
    old = (log_probs + 0.5 * torch.randn(count, dtype=F64, generator=generator)).clamp(max=-0.01)
    advantages = torch.randn(len(LENGTHS) if per_row else count, dtype=F64, generator=generator)
    if per_row:
        advantages = advantages.repeat_interleave(torch.tensor(LENGTHS))
    mask = torch.tensor([True, True, False, True, True, True, True, True, False, False] + [True] * 5)
    return log_probs, old, advantages, mask


def counts_of(mask):
    counted = sum(bool(part.any()) for part in mask.split(LENGTHS))
    return Counts(mask, torch.tensor(LENGTHS), float(mask.sum()), float(counted), horizon=10.0)


def responses(*columns):
    """Return the counted tokens of each row that has any."""
    *columns, mask = columns
    for parts in zip(*(column.split(LENGTHS) for column in (*columns, mask)), strict=True):
        *values, kept = parts
        if bool(kept.any()):
            yield [value[kept] for value in values]


def paper_gspo(log_probs, old, advantages, mask):
    """s_i = (pi(y) / pi_old(y))^(1 / |y|), the mean over responses of min(s A, clip(s) A)."""
    terms = []
    for new, before, advantage in responses(log_probs, old, advantages, mask):
        ratio = (new.sum().exp() / before.sum().exp()) ** (1 / len(new))
        clipped = torch.clamp(ratio, 1 - NARROW.low, 1 + NARROW.high)
        terms.append(torch.minimum(ratio * advantage[0], clipped * advantage[0]))
    return -torch.stack(terms).mean()


def paper_gspo_token(log_probs, old, advantages, mask):
    """The same with an advantage for each token, s_it = sg(s_i) pi_t / sg(pi_t)."""
    terms = []
    for new, before, advantage in responses(log_probs, old, advantages, mask):
        sequence = ((new - before).sum() / len(new)).exp().detach()
        ratio = sequence * new.exp() / new.exp().detach()
        clipped = torch.clamp(ratio, 1 - NARROW.low, 1 + NARROW.high)
        terms.append(torch.minimum(ratio * advantage, clipped * advantage).mean())
    return -torch.stack(terms).mean()


def paper_gmpo(log_probs, old, advantages, mask):
    """The mean over responses of A (prod_t clipped r_t)^(1 / |y|), clipped to [e^-low, e^high] on the side of A."""
    terms = []
    for new, before, advantage in responses(log_probs, old, advantages, mask):
        ratio = (new - before).exp()
        bound = ratio.clamp(math.exp(-NARROW.low), math.exp(NARROW.high))
        kept = torch.minimum(ratio, bound) if advantage[0] > 0 else torch.maximum(ratio, bound)
        terms.append(advantage[0] * kept.prod() ** (1 / len(new)))
    return -torch.stack(terms).mean()


def paper_sapo(log_probs, old, advantages, mask):
    """The mean over responses of the mean of 4 / tau sigmoid(tau (r - 1)) A."""
    terms = []
    for new, before, advantage in responses(log_probs, old, advantages, mask):
        taus = [1.0 if a > 0 else 1.05 for a in advantage.tolist()]
        ratios = (new - before).exp()
        gates = [4 / (tau * (1 + (-tau * (ratio - 1)).exp())) for tau, ratio in zip(taus, ratios, strict=True)]
        terms.append((torch.stack(gates) * advantage).mean())
    return -torch.stack(terms).mean()


def paper_dppo(divergence, log_probs, old, advantages, mask):
    """Sum over the tokens of M min(r, dual) A log pi; M = 0 if the divergence is too large and r is beyond 1."""
    total, number = 0, 0
    for columns in responses(log_probs, old, advantages, mask):
        for new, before, advantage in zip(*columns, strict=True):
            p, q = new.exp().item(), before.exp().item()
            bound = NARROW.high if advantage > 0 else NARROW.low
            away = p > q if advantage > 0 else p < q
            if not (away and divergence(p, q) > bound):
                total = total + min(p / q, NARROW.dual) * advantage * new
            number += 1
    return -total / number


def total_variation(p, q):
    return (abs(p - q) + abs((1 - p) - (1 - q))) / 2


def binary_kl(p, q):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def paper_gpg(log_probs, old, advantages, mask):
    """Sum over all tokens of A log pi, divided by their number."""
    return -(advantages * log_probs)[mask].sum() / mask.sum()


def paper_dro(log_probs, old, advantages, mask):
    """The mean over all tokens of A log pi - beta / 2 log^2(pi / pi_old), with beta = 0.7."""
    pairs = zip(log_probs[mask], old[mask], advantages[mask], strict=True)
    return -sum(advantage * new - 0.35 * (new - before) ** 2 for new, before, advantage in pairs) / mask.sum()


def paper_cispo(log_probs, old, advantages, mask):
    """Sum over all tokens of sg(clip(r)) A log pi, divided by their number."""
    total, number = 0, 0
    for new, before, advantage in responses(log_probs, old, advantages, mask):
        weight = torch.clamp((new - before).exp(), 1 - NARROW.low, 1 + NARROW.high).detach()
        total, number = total + (weight * advantage * new).sum(), number + len(new)
    return -total / number


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("implementation", "paper", "mode", "per_row"),
    [
        (gspo_loss, paper_gspo, "seq-mean-token-mean", True),
        (gspo_loss, paper_gspo_token, "seq-mean-token-mean", False),
        (geo_mean_loss, paper_gmpo, "seq-mean-token-mean", True),
        (sapo_loss, paper_sapo, "seq-mean-token-mean", False),
        (dppo_tv_loss, partial(paper_dppo, total_variation), "token-mean", False),
        (dppo_kl_loss, partial(paper_dppo, binary_kl), "token-mean", False),
        (gpg_loss, paper_gpg, "token-mean", False),
        (partial(dro_loss, dro_beta=0.7), paper_dro, "token-mean", False),
        (cispo_loss, paper_cispo, "token-mean", True),
        (cispo_loss, paper_cispo, "token-mean", False),
    ],
    ids=[
        *("gspo", "gspo-token", "gmpo", "sapo", "dppo_tv", "dppo_kl", "gpg", "dro"),
        *("cispo", "cispo, advantages per token"),
    ],
)
def test_loss_and_gradient_match_the_paper(implementation, paper, mode, per_row, seed):
    log_probs, old, advantages, mask = rows(seed, per_row)
    leaf, paper_leaf = (log_probs.clone().requires_grad_() for _ in range(2))
    spoilt = [torch.where(mask, column, NAN) for column in (old, advantages)]
    loss, metrics = implementation(leaf, *spoilt, counts_of(mask), clip=NARROW, mode=mode)
    paper_loss = paper(paper_leaf, old, advantages, mask)
    torch.testing.assert_close(loss, paper_loss)
    (gradient,), (expected,) = torch.autograd.grad(loss, leaf), torch.autograd.grad(paper_loss, paper_leaf)
    torch.testing.assert_close(gradient, expected)
    assert float(metrics["ppo_kl"]) == pytest.approx(float((old - log_probs)[mask].mean()))
    assert float(metrics.get("pg_clipfrac", 1)) > 0, "no ratio was clipped"


def test_gspo_by_hand():
    # Rows of 2 and 1 tokens: mean differences log 1.21 / 2 = log 1.1 and log 1.5, so s = 1.1 and 1.5, the second
    # clipped to 1.3; A = 2 and 1: -(2.2 + 1.3) / 2. The first row's tokens each have gradient -2 * 1.1 / 2 / 2.
    log_probs = torch.tensor([math.log(1.21), 0.0, math.log(1.5)], dtype=F64, requires_grad=True)
    counts = Counts(torch.tensor([True] * 3), torch.tensor([2, 1]), 3.0, 2.0)
    advantages = torch.tensor([2.0, 2.0, 1.0], dtype=F64)
    zeros = torch.zeros(3, dtype=F64)
    loss, metrics = gspo_loss(log_probs, zeros, advantages, counts, clip=CLIP, mode="seq-mean-token-mean")
    loss.backward()
    assert loss.item() == pytest.approx(-1.75)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-0.55, -0.55, 0.0])
    assert float(metrics["pg_clipfrac"]) == pytest.approx(1 / 3)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    # Ratios 2 (clipped to 1.3) and 0.5 (to 0.8): gradient -A weight / 2.
    log_probs = torch.tensor([math.log(2.0), math.log(0.5)], dtype=F64, requires_grad=True)
    counts = Counts(torch.tensor([True] * 2), torch.tensor([2]), 2.0, 1.0)
    advantages = torch.tensor([1.0, -3.0], dtype=F64)
    loss, metrics = cispo_loss(log_probs, torch.zeros(2, dtype=F64), advantages, counts, clip=CLIP, mode="token-mean")
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.3 / 2, 3 * 0.8 / 2])
    assert float(metrics["pg_clipfrac"]) == 1


def test_cispo_with_low_of_one_has_no_lower_bound():
    log_probs = torch.tensor([-3.0], dtype=F64, requires_grad=True)
    counts = Counts(torch.tensor([True]), torch.tensor([1]), 1.0, 1.0)
    one, zero = torch.ones(1, dtype=F64), torch.zeros(1, dtype=F64)
    for low in (1.0, 10.0):
        loss, _ = cispo_loss(log_probs, zero, one, counts, clip=Clip(low, 0.2), mode="token-mean")
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert gradient.item() == pytest.approx(-math.exp(-3))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_all_losses_are_the_policy_gradient(name):
    log_probs, _, advantages, mask = rows()
    log_probs.requires_grad_()
    function = partial(POLICY_LOSSES[name], **parameters(name, len(log_probs)))
    loss, _ = function(log_probs, log_probs.detach(), advantages, counts_of(mask), clip=CLIP, mode="token-mean")
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, torch.where(mask, -advantages / mask.sum(), 0))


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - {"gpg", "dro"}))
def test_a_huge_difference_does_not_overflow(name):
    log_probs = torch.tensor([500.0, -500.0], requires_grad=True)
    counts = Counts(torch.tensor([True, True]), torch.tensor([1, 1]), 2.0, 2.0)
    advantages = torch.tensor([-1.0, 1.0])
    function = partial(POLICY_LOSSES[name], **parameters(name, 2))
    loss, _ = function(log_probs, torch.zeros(2), advantages, counts, clip=CLIP, mode="token-mean")
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


# -- numbers worked out by hand -------------------------------------------------------------------


def loss_of(function, ratios, advantages, lengths=(1,), old=0.0, mode="token-mean", **options):
    """Return (loss, gradient of the log-probs, metrics) of tokens with these ratios."""
    log_probs = (torch.tensor(ratios, dtype=F64).log() + old).requires_grad_()
    count, rows = len(ratios), torch.tensor(lengths)
    counts = Counts(torch.ones(count, dtype=torch.bool), rows, float(count), float(len(rows)))
    before = torch.full((count,), old, dtype=F64)
    options = {"clip": CLIP, "mode": mode, **options}
    loss, metrics = function(log_probs, before, torch.tensor(advantages, dtype=F64), counts, **options)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient.tolist(), {name: float(value) for name, value in metrics.items()}


def test_gmpo_by_hand():
    # Differences 0.5, -0.1 with A = 2: clipped to 0.3 and kept: mean 0.1. Difference -0.4 with A = -1: clipped to -0.2.
    ratios = [math.exp(0.5), math.exp(-0.1), math.exp(-0.4)]
    loss, gradient, metrics = loss_of(geo_mean_loss, ratios, [2.0, 2.0, -1.0], (2, 1), mode="seq-mean-token-mean")
    assert loss == pytest.approx((-2 * math.exp(0.1) + math.exp(-0.2)) / 2)
    assert gradient == pytest.approx([0, -2 * math.exp(0.1) / 2 / 2, 0])
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 3)


def test_gmpo_keeps_differences_that_clipping_would_increase():
    # Both moved against their advantage: the pessimistic ratio is the unclipped one.
    ratios = [math.exp(-2.0), math.exp(2.0)]
    loss, _, metrics = loss_of(geo_mean_loss, ratios, [1.0, -1.0], (1, 1), mode="seq-mean-token-mean")
    assert loss == pytest.approx((-math.exp(-2) + math.exp(2)) / 2)
    assert metrics["pg_clipfrac"] == 0


def test_weights_of_gmpo_are_their_geometric_mean():
    weights = torch.tensor([4.0, 1.0, 0.0], dtype=F64)
    options = {"mode": "seq-mean-token-mean", "weights": weights}
    loss, gradient, _ = loss_of(geo_mean_loss, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], (2, 1), **options)
    assert loss == pytest.approx(-2 / 2)  # 2 = sqrt(4 1), and 0
    assert gradient[2] == 0


def test_sapo_by_hand():
    # tau 1 at ratio 1 + log 3: sigmoid(log 3) = 3/4, gate 3, slope 4 3/4 1/4 = 3/4. tau 2 at ratio 1: gate 1, slope 1.
    ratio = 1 + math.log(3)
    loss, gradient, metrics = loss_of(sapo_loss, [ratio, 1.0], [1.0, -1.0], (2,), tau=(1.0, 2.0))
    assert loss == pytest.approx((-3 + 1) / 2)
    assert gradient == pytest.approx([-0.75 * ratio / 2, 1 / 2])
    assert metrics["ppo_kl"] == pytest.approx(-math.log(ratio) / 2)


def test_dppo_tv_by_hand():
    # pi_old = 1/2; pi = 0.65, 0.85 (0.35 > 0.3), 0.35 with A > 0, and 0.35, 0.25 (-0.25 < -0.2), 0.9 with A < 0.
    pi = [0.65, 0.85, 0.35, 0.35, 0.25, 0.9]
    advantages = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    loss, gradient, metrics = loss_of(
        dppo_tv_loss, [2 * p for p in pi], advantages, (6,), math.log(0.5), clip=Clip(0.2, 0.3, dual=1.5)
    )
    assert gradient == pytest.approx([-1.3 / 6, 0, -0.7 / 6, 0.7 / 6, 0, 1.5 / 6])
    kept = -1.3 * math.log(0.65) - 0.7 * math.log(0.35) + 0.7 * math.log(0.35) + 1.5 * math.log(0.9)
    assert loss == pytest.approx(kept / 6)
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 6)
    assert metrics["pg_clipfrac_lower"] == pytest.approx(1 / 6)


def test_dppo_kl_by_hand():
    # pi_old = 1/2, pi = 3/4: D = 1/2 log 2/3 + 1/2 log 2 = 0.144; pi = 1/4 has the same D in the other direction.
    ratios, advantages = [1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0]
    inside = loss_of(dppo_kl_loss, ratios, advantages, (4,), math.log(0.5), clip=Clip(0.15, 0.15))
    outside = loss_of(dppo_kl_loss, ratios, advantages, (4,), math.log(0.5), clip=Clip(0.14, 0.14))
    assert inside[1] == pytest.approx([-1.5 / 4, -0.5 / 4, 1.5 / 4, 0.5 / 4])
    assert outside[1] == pytest.approx([0, -0.5 / 4, 1.5 / 4, 0])
    assert outside[2]["pg_clipfrac"] == pytest.approx(2 / 4)


def test_dppo_kl_with_a_certain_token():
    # pi_old = 1 and pi = 1/2: D = log 2. pi = 1 and pi_old = 1/2: infinite, so only A < 0 may move it back.
    certain = loss_of(dppo_kl_loss, [0.5, 0.5], [-1.0, 1.0], (2,), clip=Clip(0.6, 0.6))
    assert certain[1] == pytest.approx([0, -0.5 / 2])
    infinite = loss_of(dppo_kl_loss, [2.0, 2.0], [1.0, -1.0], (2,), math.log(0.5), clip=Clip(1e9, 1e9))
    assert infinite[1] == pytest.approx([0, 2 / 2])


def test_dro_is_smallest_where_the_difference_is_a_over_beta():
    # -1 log pi + 1/4 d^2 at d = 2: -2 + 1, without gradient.
    loss, gradient, _ = loss_of(dro_loss, [math.exp(2.0)], [1.0], dro_beta=0.5)
    assert loss == pytest.approx(-1)
    assert gradient == pytest.approx([0])


def test_gpg_by_hand():
    loss, gradient, metrics = loss_of(gpg_loss, [0.5, 0.25], [1.0, -2.0], (2,))
    assert loss == pytest.approx((math.log(2) - 2 * math.log(4)) / 2)
    assert gradient == pytest.approx([-1 / 2, 2 / 2])
    assert metrics["ppo_kl"] == pytest.approx(math.log(8) / 2)


@pytest.mark.parametrize("name", ["geo_mean", "sapo", "gpg", "dro", "clip_cov", "kl_cov"])
def test_gradients_match_finite_differences(name):
    # ratios away from every kink, with either sign of A; a row whose tokens do not count
    log_probs = torch.tensor([0.5, 0.9, 1.1, 2.0, 0.7, 1.0], dtype=F64).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 1.0], dtype=F64)
    counts = Counts(torch.tensor([True] * 5 + [False]), torch.tensor([3, 2, 1]), 5.0, 2.0)
    options = {"clip": CLIP, "mode": "seq-mean-token-mean", **parameters(name, 6)}

    def loss(x):
        return POLICY_LOSSES[name](x, torch.zeros_like(x), advantages, counts, **options)[0]

    assert torch.autograd.gradcheck(loss, log_probs)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "cispo"])
def test_surrogate_gradients_match_finite_differences_of_the_log_prob(name):
    # The factor of log pi is constant, so the gradient is that of factor log pi.
    ratios, advantages = [0.9, 1.1, 1.4, 0.6], [1.0, -1.0, 1.0, -1.0]
    loss, gradient, _ = loss_of(POLICY_LOSSES[name], ratios, advantages, (4,), math.log(0.5), clip=Clip(0.12, 0.12))
    log_probs = [math.log(ratio / 2) for ratio in ratios]
    assert loss == pytest.approx(sum(g * x for g, x in zip(gradient, log_probs, strict=True)))
    assert gradient[0] == pytest.approx(-0.9 / 4)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_equal_rewards_give_no_gradient(name):
    log_probs, old, advantages, mask = rows()
    old = log_probs if name in ("dro", "kl_cov") else old  # their penalties do not depend on A
    log_probs = log_probs.clone().requires_grad_()
    options = {"clip": CLIP, "mode": "seq-mean-token-mean", **parameters(name, len(log_probs))}
    loss, _ = POLICY_LOSSES[name](log_probs, old, torch.zeros_like(advantages), counts_of(mask), **options)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss == 0
    assert (gradient == 0).all()


def test_clip_cov_leaves_out_selected_tokens():
    # Ratios 1.1, 2 (clipped to 1.3) and 5 with A = -1, which has no dual clip; the first is left out.
    selected = torch.tensor([True, False, False])
    loss, gradient, metrics = loss_of(clip_cov_loss, [1.1, 2.0, 5.0], [1.0, 1.0, -1.0], (3,), selected=selected)
    assert loss == pytest.approx((-1.3 + 5) / 3)
    assert gradient == pytest.approx([0, 0, 5 / 3])
    assert metrics["cov_selected"] == metrics["pg_clipfrac"] == pytest.approx(1 / 3)


def test_kl_cov_penalizes_the_change_of_selected_tokens():
    # -A r + 0.5 |log r| at r = 2 and 1/2; no clip at r = 4.
    penalties = torch.tensor([0.5, 0.5, 0.0], dtype=F64)
    loss, gradient, metrics = loss_of(kl_cov_loss, [2.0, 0.5, 4.0], [1.0, -1.0, 1.0], (3,), penalties=penalties)
    assert loss == pytest.approx((-2 + 0.5 * math.log(2) + 0.5 + 0.5 * math.log(2) - 4) / 3)
    assert gradient == pytest.approx([(-2 + 0.5) / 3, (0.5 - 0.5) / 3, -4 / 3])
    assert metrics["cov_selected"] == pytest.approx(2 / 3)


def test_kl_cov_does_not_take_a_rounding_error_for_a_change():
    penalties, error = torch.ones(2, dtype=F64), 1e-6
    _, gradient, metrics = loss_of(kl_cov_loss, [1 + error, 1 - error], [1.0, 1.0], (2,), penalties=penalties)
    assert gradient == pytest.approx([-0.5, -0.5], rel=2 * error)
    assert metrics["cov_selected"] == 1
