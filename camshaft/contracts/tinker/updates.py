"""Rules about gradients, optimizer steps and adapters. `suite.py` lists them."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace
from typing import Any

from camshaft.contracts.rules import expect
from camshaft.contracts.tinker.client import Failed, Refused
from camshaft.contracts.tinker.harness import (
    TinkerHarness,
    expect_failure,
    largest_difference,
    messages,
)
from camshaft.wire.schemas import AdamSettings

STEPS = (
    AdamSettings(0.5, 0.9, 0.95, eps=0.3),
    AdamSettings(0.2, 0.5, 0.6, eps=0.1, weight_decay=0.3),
    AdamSettings(0.7, 0.8, 0.99, eps=1.0, weight_decay=0.1),
)
"""Settings of the steps of a rule; the learning rates are factors of the usual one."""
MINIMUM_EFFECT = 100.0
"""Change of log-probs by an update that is there, as a multiple of the tolerance."""


def gradients_add_up(harness: TinkerHarness) -> None:
    """The gradients of several calls add up until the next optimizer step, which clears them."""
    model, oracle, rows = harness.model(), harness.oracle(), harness.rows(6, 3, 9, 4)
    for part in (rows[:1], rows[1:3], rows[3:]):
        model.run(messages(part))
        oracle.train(part)
    for _ in range(2):
        model.update(**harness.adam())
        oracle.update(**harness.adam())
        harness.expect_weights(model, oracle)
        model.run(messages(rows[:2]))
        oracle.train(rows[:2])


def forward_only_changes_nothing(harness: TinkerHarness) -> None:
    """A request with forward_only changes neither weights nor gradients, and returns the same log-probs and loss."""
    model, oracle, rows = harness.model(), harness.oracle(), harness.rows()
    others = harness.rows(7, 7, seed=3)
    expected = oracle.train(rows)
    model.run(messages(rows))
    log_probs, value = model.run(messages(others), forward_only=True)
    harness.expect_close(log_probs, oracle.values(others), "the log-probs of a forward pass")
    harness.expect_loss(model.run(messages(rows), forward_only=True)[1], expected, "loss:sum of a forward pass")
    harness.expect_loss(value, -sum(map(sum, oracle.values(others))), "loss:sum of a forward pass")
    model.update(**harness.adam())
    oracle.update(**harness.adam())
    harness.expect_weights(model, oracle)


def updates_are_those_of_adamw(harness: TinkerHarness) -> None:
    """Three updates with changing learning rate, betas, eps and weight decay equal those of torch.optim.AdamW."""
    model, oracle, rate = harness.model(), harness.oracle(), harness.target.learning_rate
    for number, settings in enumerate(STEPS):
        rows = harness.rows(seed=number)
        adam = asdict(replace(settings, learning_rate=settings.learning_rate * rate))
        model.run(messages(rows))
        oracle.train(rows)
        model.update(**adam)
        oracle.update(**adam)
        harness.expect_weights(model, oracle, f"the log-probs after update {number + 1}")


def clipping_is_of_the_sum(harness: TinkerHarness) -> None:
    """A positive grad_clip_norm bounds the norm of the sum of all gradients of a step; 0 does not clip."""
    rows = harness.rows()
    oracle = harness.oracle()
    oracle.train(rows)
    norm = oracle.norm()
    for clip in (0.0, norm / 2, norm * 1.5):
        model, expected = harness.model(), harness.oracle()
        for row in rows:
            model.run(messages([row]))
            expected.train([row])
        model.update(**harness.adam(grad_clip_norm=clip))
        expected.update(**harness.adam(grad_clip_norm=clip))
        harness.expect_weights(model, expected, f"the log-probs after an update with grad_clip_norm={clip:.3g}")
        harness.finish()


def steps_need_gradients(harness: TinkerHarness) -> None:
    """An optimizer step without gradients does not change weights: it fails with a sentence, or has no effect."""
    model, rows = harness.model(rank=8), messages(harness.rows())
    model.run(rows)
    model.update(**harness.adam())
    before = model.forward(rows)
    with contextlib.suppress(Failed, Refused):
        model.update(**harness.adam(beta1=0.0, weight_decay=0.0))
    harness.expect_close(model.forward(rows), before, "the log-probs before and after a step without gradients")


def infinite_gradients_change_nothing(harness: TinkerHarness) -> None:
    """If the loss or the gradient of a datum is not finite, the optimizer step fails, changes no weight, and an error
    names the datum; afterwards the model is usable."""
    model, rows = harness.model(), harness.rl_rows()
    spoiled = rows[1].having(logprobs=[-1e4] * len(rows[1].targets), advantages=[1.0] * len(rows[1].targets))
    sentences = list[str]()
    promises = [model.train(1, messages([rows[0], spoiled]), "importance_sampling"), model.step(2, **harness.adam())]
    for promise in promises:
        try:
            model.wait(promise)
        except Exception as error:
            sentences.append(str(error))
    expect(len(sentences) > 0, "an update with an infinite ratio has succeeded")
    expect("datum 1" in " ".join(sentences), f"no error names the datum 1: {sentences}")
    model.num_commands = 2
    plain = harness.rows()
    harness.expect_close(
        model.forward(messages(plain)), harness.oracle().values(plain), "the log-probs after a failure"
    )
    oracle = harness.oracle()
    oracle.train(rows, "importance_sampling")
    oracle.update(**harness.adam())
    model.run(messages(rows), "importance_sampling")
    model.update(**harness.adam())
    harness.expect_weights(model, oracle, "the log-probs after a step that failed and one that did not")


def invalid_settings_are_errors(harness: TinkerHarness) -> None:
    """Loss inputs and options that the server does not know, and settings of a step that are not numbers of their
    range, are errors that name them. They are not ignored."""
    model, rows = harness.model(rank=8), harness.rows()
    unknown = messages([row.having(temperatures=[1.0] * len(row.targets)) for row in rows])
    missing = messages([row.having(logprobs=[-1.0] * len(row.targets)) for row in rows])
    expect_failure(lambda: model.run(unknown), "an unknown input of a loss is ignored", "temperatures")
    expect_failure(lambda: model.run(missing, "ppo"), "a missing input of a loss is accepted", "advantages")
    expect_failure(lambda: model.run(messages(rows), clip=1.0), "an unknown option is ignored", "clip")
    if model.num_commands:  # which were accepted, and have failed
        expect_failure(lambda: model.update(), "a step after failed commands has succeeded")
    model.run(messages(rows))
    expect_failure(lambda: model.update(beta1=1.5), "beta1=1.5 is accepted", "beta")


def adapters_begin_at_the_base_and_learn(harness: TinkerHarness) -> None:
    """A new adapter does not change the model, and its first update does: neither its rank nor its alpha is 0."""
    model, rows = harness.model(rank=4), harness.rows()
    base = harness.oracle().values(rows)
    actual, _ = model.run(messages(rows))
    harness.expect_close(actual, base, "the log-probs of a new adapter and of its base")
    model.update(learning_rate=1e-2)
    change = largest_difference(model.forward(messages(rows)), base)
    limit = MINIMUM_EFFECT * harness.target.tolerance
    expect(change > limit, f"an update of an adapter changes log-probs by {change:.2g} only")
    rank = model.client.rank_of(model.identifier)
    expect(rank == 4, f"get_info has the rank {rank}, expected 4")


def adapter_seeds_reproduce(harness: TinkerHarness) -> None:
    """Two adapters with the same seed have the same update, and one with another seed has another one."""
    results = [_updated(harness, seed=seed) for seed in (1, 1, 2)]
    harness.expect_close(results[0], results[1], "the log-probs after updates of adapters with the same seed")
    _expect_other(harness, results[0], results[2], "adapters with different seeds have the same update")


def adapter_groups_select_layers(harness: TinkerHarness) -> None:
    """train_attn and train_mlp select the layers that have adapters."""
    groups = ({"train_attn": True, "train_mlp": False}, {"train_attn": False, "train_mlp": True}, {})
    attention, mlp, both = (_updated(harness, train_unembed=False, **group) for group in groups)
    _expect_other(harness, attention, mlp, "adapters on attention and on MLP layers have the same update")
    _expect_other(harness, attention, both, "train_mlp=False has no effect")
    _expect_other(harness, mlp, both, "train_attn=False has no effect")


def _updated(harness: TinkerHarness, **lora: Any) -> list[list[float]]:
    """Return log-probs after an update of an adapter. Its session has ended."""
    rows = messages(harness.rows())
    model = harness.model(rank=8, **lora)
    model.run(rows)
    model.update(learning_rate=1e-2)
    result = model.forward(rows)
    harness.finish()
    return result


def _expect_other(harness: TinkerHarness, a: list[list[float]], b: list[list[float]], problem: str) -> None:
    expect(largest_difference(a, b) > MINIMUM_EFFECT / 10 * harness.target.tolerance, problem)


CHECKS = (
    gradients_add_up,
    forward_only_changes_nothing,
    updates_are_those_of_adamw,
    clipping_is_of_the_sum,
    steps_need_gradients,
    infinite_gradients_change_nothing,
    invalid_settings_are_errors,
    adapters_begin_at_the_base_and_learn,
    adapter_seeds_reproduce,
    adapter_groups_select_layers,
)
