"""GSPO and CISPO, compared with the formulas of their papers: padded rows, loops over responses, float64."""

import math

import pytest
import torch

from camshaft.algorithms import POLICY_LOSSES, Clip, Counts, cispo_loss, gspo_loss

F64 = torch.float64
NAN = float("nan")
CLIP = Clip(low=0.2, high=0.3)
NARROW = Clip(low=0.02, high=0.03)
LENGTHS = [4, 1, 3, 2, 5]


def rows(seed=0, per_row=True):
    """Return flat tokens of five rows, one without counted tokens; `per_row`: one advantage for all tokens of a row."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    log_probs = -torch.rand(count, dtype=F64, generator=generator)
    old = log_probs + 0.5 * torch.randn(count, dtype=F64, generator=generator)
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
        (cispo_loss, paper_cispo, "token-mean", True),
        (cispo_loss, paper_cispo, "token-mean", False),
    ],
    ids=["gspo", "gspo-token", "cispo", "cispo, advantages per token"],
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
    assert float(metrics["pg_clipfrac"]) > 0, "no ratio was clipped"


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
    loss, _ = POLICY_LOSSES[name](
        log_probs, log_probs.detach(), advantages, counts_of(mask), clip=CLIP, mode="token-mean"
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, torch.where(mask, -advantages / mask.sum(), 0))


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_a_huge_difference_does_not_overflow(name):
    log_probs = torch.tensor([500.0, -500.0], requires_grad=True)
    counts = Counts(torch.tensor([True, True]), torch.tensor([1, 1]), 2.0, 2.0)
    advantages = torch.tensor([-1.0, 1.0])
    loss, _ = POLICY_LOSSES[name](log_probs, torch.zeros(2), advantages, counts, clip=CLIP, mode="token-mean")
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
