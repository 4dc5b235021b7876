"""The part of the rollout contract that says what becomes of weights: which ones count, and what is proved of them.

The rules are listed in `contract.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from camshaft.contracts.rollout.harness import Case, RolloutHarness, expect_refusal, off_by
from camshaft.contracts.rules import expect
from camshaft.digest import digest
from camshaft.rollout.base import BaseRollout, SamplingParams


def the_last_weights_count(harness: RolloutHarness) -> None:
    """After a second load_weights log-probs are those of the new weights; stale ones would be far off."""
    case, prompts, sampling = harness.case(), harness.prompts(4, 9), SamplingParams(12)
    before = case.rollout.generate_sequences(prompts, sampling)
    case.check_log_probs(prompts, before, sampling, "log-probs of the first weights", harness.tolerance)
    case.rollout.load_weights(case.other_weights())
    after = case.rollout.generate_sequences(prompts, sampling)
    stale = off_by(after.log_probs, case.log_probs(prompts, after.responses, sampling))
    expect(stale > 0.1, f"the log-probs are still those of the first weights (off by {stale:.1e})")
    for weight, (_, new) in zip(case.plain.parameters(), case.other_weights(), strict=True):
        weight.data = new
    case.check_log_probs(prompts, after, sampling, "log-probs after the load", harness.tolerance)


def tied_weights_come_once_or_twice(harness: RolloutHarness) -> None:
    """A tied output weight may be left out, come instead of the embedding, or come beside it; new values count."""
    case, prompts = harness.empty_case(), harness.prompts(4, 9)
    inner, outer = "model.embed_tokens.weight", "lm_head.weight"
    for names in ((inner,), (outer,), (inner, outer)):
        for weight in case.plain.parameters():
            weight.data *= 1.2 if weight.ndim > 1 else 1
        weights = dict(case.weights())
        tied = weights.pop(inner)
        case.rollout.load_weights([*((name, tied) for name in names), *weights.items()])
        out = case.rollout.generate_sequences(prompts, SamplingParams(6))
        case.check_log_probs(prompts, out, SamplingParams(6), tolerance=harness.tolerance)


def weights_that_do_not_fit_are_named(harness: RolloutHarness) -> None:
    """A missing, an unknown and a misshapen weight are errors that name it, and leave nothing to generate with."""
    case = harness.case()
    name = "model.layers.1.mlp.up_proj.weight"
    weights = dict(case.weights())
    wrong = {
        "missing": {n: w for n, w in weights.items() if n != name},
        "unknown": weights | {"model.layers.1.mlp.sideways.weight": weights[name]},
        "misshapen": weights | {name: weights[name][:-1]},
    }
    told = {"missing": name, "unknown": "sideways", "misshapen": name}
    for kind, sent in wrong.items():
        expect_refusal(lambda: case.rollout.load_weights(sent.items()), told[kind], f"a {kind} weight was taken")  # noqa: B023
        _refuses_to_generate(case, harness, f"after a {kind} weight")
    case.rollout.load_weights(case.weights())
    case.rollout.generate_sequences(harness.prompts(4), SamplingParams(2))


def weights_come_before_tokens(harness: RolloutHarness) -> None:
    """Without weights there is an error that says to load them."""
    _refuses_to_generate(harness.empty_case(), harness, "before load_weights")


def sleep_and_wake(harness: RolloutHarness) -> None:
    """Asleep it refuses, awake it wants weights again, and then it generates as before."""
    case, prompts = harness.case(), harness.prompts(4, 9)
    before = case.rollout.generate_sequences(prompts, SamplingParams(8, temperature=0))
    for _ in range(2):
        case.rollout.sleep()
        expect_refusal(
            lambda: case.rollout.generate_sequences(prompts, SamplingParams(8)), "wake_up", "it generated while asleep"
        )
        expect_refusal(lambda: case.rollout.load_weights(case.weights()), "wake_up", "it took weights while asleep")
        case.rollout.wake_up()
        _refuses_to_generate(case, harness, "after sleep() and wake_up()")
        case.rollout.load_weights(case.weights())
        after = case.rollout.generate_sequences(prompts, SamplingParams(8, temperature=0))
        expect(torch.equal(after.responses.values, before.responses.values), "it generates other tokens after sleep")
    case.rollout.wake_up()
    case.rollout.generate_sequences(prompts, SamplingParams(2))


def _refuses_to_generate(case: Case, harness: RolloutHarness, when: str) -> None:
    expect_refusal(
        lambda: case.rollout.generate_sequences(harness.prompts(4), SamplingParams(2)),
        "load_weights",
        f"it generated {when}",
    )


def digests_tell_what_is_held(harness: RolloutHarness) -> None:
    """weight_digests() has the names that came, with the digests of what came; other weights have others."""
    for dtype in ("float32", "bfloat16"):
        case = harness.empty_case(dtype=dtype)
        expect_refusal(case.rollout.weight_digests, "load_weights", "there were digests before there were weights")
        for weights in (case.weights(), case.other_weights(), case.weights()):
            sent = [(name, _cast(case.rollout, name, weight)) for name, weight in weights]
            case.rollout.load_weights(sent)
            held, wanted = case.rollout.weight_digests(), {name: digest(weight) for name, weight in sent}
            expect(held.keys() == wanted.keys(), f"names that differ: {sorted(held.keys() ^ wanted.keys())}")
            wrong = [name for name in wanted if held[name] != wanted[name]]
            expect(not wrong, f"{dtype}: the digests of {', '.join(wrong[:4])} are not those of what was sent")


def digests_find_a_transposed_weight(harness: RolloutHarness) -> None:
    """A square weight that arrives transposed has another digest; one that comes after sleep has one again."""
    case = harness.case()
    name = next(name for name, weight in case.weights() if weight.ndim == 2 and weight.shape[0] == weight.shape[1])
    before = dict(case.rollout.weight_digests())
    weights = {n: weight.detach() for n, weight in case.weights()}
    case.rollout.load_weights((weights | {name: weights[name].t().contiguous()}).items())
    after = dict(case.rollout.weight_digests())
    changed = {n for n in before if before[n] != after[n]}
    expect(changed == {name}, f"'{name}' was transposed, and the digests of {sorted(changed)} changed")
    case.rollout.sleep()
    expect_refusal(case.rollout.weight_digests, "wake_up", "there were digests while asleep")
    case.rollout.wake_up()
    case.rollout.load_weights(case.weights())
    expect(dict(case.rollout.weight_digests()) == before, "the first weights have other digests after sleep")


def _cast(rollout: BaseRollout, name: str, weight: Tensor) -> Tensor:
    """As a hand-over does it."""
    return weight.detach().to(rollout.arrival_dtype(name, weight))


def half_precision_is_near(harness: RolloutHarness) -> None:
    """With dtype=bfloat16, float32 weights are rounded on arrival, and log-probs stay near those of float32."""
    case, prompts, sampling = harness.empty_case(dtype="bfloat16"), harness.prompts(4, 9, 12), SamplingParams(12)
    for weight in case.plain.parameters():
        weight.data /= 4 if weight.ndim > 1 else 1
    case.rollout.load_weights(case.weights())
    out = case.rollout.generate_sequences(prompts, sampling)
    wanted = case.log_probs(prompts, out.responses, sampling)
    mean = (out.log_probs.values.double() - wanted.values).abs().mean().item()
    expect(mean < 2e-2, f"log-probs in bfloat16 are off by {mean:.1e} on average")
