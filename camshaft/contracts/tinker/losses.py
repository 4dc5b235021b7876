"""Rules about log-probs, and about values and gradients of losses. `suite.py` lists them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from camshaft.contracts.tinker.harness import TinkerHarness, messages
from camshaft.contracts.tinker.oracle import Row

NARROW = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}


def log_probs_are_those_of_the_targets(harness: TinkerHarness) -> None:
    """The answer has the log-prob of each target, also where its weight is 0, and for targets that are not the tokens
    that follow."""
    free = Row([7, 8, 9, 10], [50, 6, 90, 7], {"weights": [0.0, 1.0, 0.0, 2.0]})
    zero = [row.having(weights=[0.0] * len(row.targets)) for row in harness.rows()]
    rows = [free, *zero]
    actual, _ = harness.model(rank=8).run(messages(rows))
    harness.expect_close(actual, harness.oracle().values(rows), "the log-probs of the targets")


def answers_are_aligned_with_datums(harness: TinkerHarness) -> None:
    """The answer has one entry per datum, in their order, with one value per target, for any number of chunks of
    tokens and any number of datums."""
    model, rows = harness.model(rank=8), harness.rows(9, 2, 5, 1, 7, 3)
    expected = harness.oracle().values(rows)
    for num_chunks in (1, 3):
        data = [row.message(min(num_chunks, len(row.tokens))) for row in rows]
        actual = model.forward(data)
        harness.expect_close(actual, expected, f"the log-probs of datums of up to {num_chunks} chunks")
    many = harness.rows(*[1 + number % 5 for number in range(64)], seed=2)
    harness.expect_close(model.forward(messages(many)), harness.oracle().values(many), "the log-probs of 64 datums")


def cross_entropy(harness: TinkerHarness) -> None:
    """The loss cross_entropy is the sum of the negative log-probs of the targets; value and gradient are exact."""
    harness.expect_gradient(harness.rows())


def weights_of_any_sign(harness: TinkerHarness) -> None:
    """Weights of cross_entropy are factors and may be negative and fractional."""
    signs = (0.25, -1.5, 3.0, 0.0)
    rows = [
        row.having(weights=[signs[(number + position) % 4] for position in range(len(row.targets))])
        for number, row in enumerate(harness.rows(8, 5, 7))
    ]
    harness.expect_gradient(rows)


def importance_sampling(harness: TinkerHarness) -> None:
    """The loss importance_sampling is -A ratio, with a gradient through the ratio."""
    harness.expect_gradient(harness.rl_rows(), "importance_sampling")


def ppo(harness: TinkerHarness) -> None:
    """The loss ppo is -min(A ratio, A clip(ratio, low, high)) for advantages of both signs. The thresholds are bounds
    of the ratio, 0.8 and 1.2 by default."""
    _expect_with_options(harness, "ppo", ({}, NARROW))


def cispo(harness: TinkerHarness) -> None:
    """The loss cispo is -clip(ratio, low, high) A log pi, without a gradient through the clipped ratio."""
    _expect_with_options(harness, "cispo", ({}, NARROW))


def dro(harness: TinkerHarness) -> None:
    """The loss dro is -(A log pi - beta / 2 (log pi - log pi_old)^2)."""
    _expect_with_options(harness, "dro", ({"beta": 0.5}, {"beta": 2.0}))


def gspo(harness: TinkerHarness) -> None:
    """The loss gspo is ppo with the ratio of the sequence, exp(mean of the log-ratios where the mask is 1), and the
    gradient of each token's own log-prob."""
    rows = harness.rl_rows(sequence_ratio_mask=1.0)
    first = rows[0]
    rows[0] = first.having(**{**first.columns, "sequence_ratio_mask": [0.0, *[1.0] * (len(first.targets) - 1)]})
    for low, high in ((0.9, 1.1), (0.5, 2.0)):
        harness.expect_gradient(rows, "gspo", clip_low_threshold=low, clip_high_threshold=high)
        harness.finish()


def _expect_with_options(harness: TinkerHarness, loss: str, options: tuple[Mapping[str, float], ...]) -> None:
    for given in options:
        harness.expect_gradient(harness.rl_rows(), loss, **given)
        harness.finish()


def losses_are_sums(harness: TinkerHarness) -> None:
    """No number of tokens or datums divides a loss: the loss of two datums is the sum of the losses of each."""
    model, rows = harness.model(rank=8), harness.rl_rows(8, 3)
    for loss in ("importance_sampling", "cross_entropy"):
        data = rows if loss != "cross_entropy" else [row.having() for row in rows]
        single = [model.run(messages([row]), loss, forward_only=True)[1] for row in data]
        _, both = model.run(messages(data), loss, forward_only=True)
        harness.expect_loss(both, sum(single), f"loss:sum of {loss} of two datums")


def custom_losses_in_two_passes(harness: TinkerHarness) -> None:
    """A loss that the client computes from the returned log-probs, and sends as the weights of cross_entropy, gives the
    gradient of the loss. The returned log-probs are precise enough for differences of log-probs."""
    model, oracle, rows = harness.model(), harness.oracle(), harness.rows()
    references = [torch.tensor(row, dtype=torch.float64) - 0.01 for row in oracle.values(rows)]

    def distance(log_probs: Tensor, reference: Tensor) -> Tensor:
        return 100 * (log_probs - reference).square().sum()

    weighted = list[Row]()
    for row, values, reference in zip(rows, model.forward(messages(rows)), references, strict=True):
        log_probs = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(distance(log_probs, reference), log_probs)
        weighted.append(row.having(weights=(-gradient).tolist()))
        distance(oracle.log_probs(row), reference).backward()
    model.run(messages(weighted))
    model.update(**harness.adam())
    oracle.update(**harness.adam())
    harness.expect_weights(model, oracle)


CHECKS = (
    log_probs_are_those_of_the_targets,
    answers_are_aligned_with_datums,
    cross_entropy,
    weights_of_any_sign,
    importance_sampling,
    ppo,
    cispo,
    dro,
    gspo,
    losses_are_sums,
    custom_losses_in_two_passes,
)
