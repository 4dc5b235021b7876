"""Rules of the rollout contract about weights, sleep and digests. `suite.py` lists them."""

from __future__ import annotations

import torch
from torch import Tensor

from camshaft.contracts.rollout.harness import Case, RolloutHarness, expect_rollout_error, largest_difference
from camshaft.contracts.rules import expect
from camshaft.digest import digest
from camshaft.rollout.base import BaseRollout, SamplingParams, load_with_version


def new_weights_replace_old_ones(harness: RolloutHarness) -> None:
    """After a second load_weights, log-probs match the new weights and not the old ones."""
    case, prompts, sampling = harness.case(), harness.prompts(4, 9), SamplingParams(12)
    before = case.rollout.generate_sequences(prompts, sampling)
    case.check_log_probs(prompts, before, sampling, "log-probs of the first weights", harness.tolerance)
    case.rollout.load_weights(case.other_weights())
    after = case.rollout.generate_sequences(prompts, sampling)
    change = largest_difference(after.log_probs, case.log_probs(prompts, after.responses, sampling))
    expect(change > 0.1, f"log-probs still match the old weights: they differ by only {change:.1e}")
    for weight, (_, new_weight) in zip(case.oracle.parameters(), case.other_weights(), strict=True):
        weight.data = new_weight
    case.check_log_probs(prompts, after, sampling, "log-probs of the second weights", harness.tolerance)


def tied_weights_load_under_either_name(harness: RolloutHarness) -> None:
    """A tied weight may be loaded under the name of the embedding, the name of the output layer, or both names."""
    case, prompts = harness.empty_case(), harness.prompts(4, 9)
    inner, outer = "model.embed_tokens.weight", "lm_head.weight"
    for names in ((inner,), (outer,), (inner, outer)):
        for weight in case.oracle.parameters():
            weight.data *= 1.2 if weight.ndim > 1 else 1
        weights = dict(case.weights())
        tied = weights.pop(inner)
        case.rollout.load_weights([*((name, tied) for name in names), *weights.items()])
        out = case.rollout.generate_sequences(prompts, SamplingParams(6))
        case.check_log_probs(prompts, out, SamplingParams(6), tolerance=harness.tolerance)


def weight_errors_name_the_weight(harness: RolloutHarness) -> None:
    """A missing, unknown or misshapen weight raises an error that contains its name. Generation then fails."""
    case = harness.case()
    name = "model.layers.1.mlp.up_proj.weight"
    weights = dict(case.weights())
    faulty_weights = {
        "missing": {n: w for n, w in weights.items() if n != name},
        "unknown": weights | {"model.layers.1.mlp.sideways.weight": weights[name]},
        "misshapen": weights | {name: weights[name][:-1]},
    }
    phrases = {"missing": name, "unknown": "sideways", "misshapen": name}
    for kind, faulty in faulty_weights.items():
        problem = f"load_weights() accepted a {kind} weight"
        expect_rollout_error(lambda: case.rollout.load_weights(faulty.items()), phrases[kind], problem)  # noqa: B023
        _expect_no_weights(case, harness, f"after a {kind} weight")
    case.rollout.load_weights(case.weights())
    case.rollout.generate_sequences(harness.prompts(4), SamplingParams(2))


def version_is_that_of_the_weights(harness: RolloutHarness) -> None:
    """The rollout reports the version that was passed to the latest load_weights that succeeded. If load_weights has no
    argument for it, the sender sets the version."""
    case, name = harness.empty_case(), "model.norm.weight"
    rollout = case.rollout
    for version in (3, 8, 2):
        load_with_version(rollout, rollout.load_weights, case.weights(), version)
        expect(rollout.version == version, f"the rollout reports version {rollout.version} of weights {version}")
    incomplete = [(other, weight) for other, weight in case.weights() if other != name]
    expect_rollout_error(
        lambda: load_with_version(rollout, rollout.load_weights, incomplete, 9),
        name,
        "load_weights() accepted a missing weight",
    )
    expect(rollout.version != 9, "the rollout reports the version of weights that it could not load")


def generation_needs_weights(harness: RolloutHarness) -> None:
    """Generation without weights raises an error that mentions load_weights."""
    _expect_no_weights(harness.empty_case(), harness, "before load_weights")


def sleep_and_wake(harness: RolloutHarness) -> None:
    """Calls during sleep raise an error. After wake_up and load_weights, the rollout generates the same tokens."""
    case, prompts = harness.case(), harness.prompts(4, 9)
    before = case.rollout.generate_sequences(prompts, SamplingParams(8, temperature=0))
    for _ in range(2):
        case.rollout.sleep()
        expect_rollout_error(
            lambda: case.rollout.generate_sequences(prompts, SamplingParams(8)),
            "wake_up",
            "the rollout generated while asleep",
        )
        expect_rollout_error(
            lambda: case.rollout.load_weights(case.weights()), "wake_up", "the rollout loaded weights while asleep"
        )
        case.rollout.wake_up()
        _expect_no_weights(case, harness, "after sleep() and wake_up()")
        case.rollout.load_weights(case.weights())
        after = case.rollout.generate_sequences(prompts, SamplingParams(8, temperature=0))
        expect(
            torch.equal(after.responses.values, before.responses.values), "the tokens differ from those before sleep"
        )
    case.rollout.wake_up()
    case.rollout.generate_sequences(prompts, SamplingParams(2))


def _expect_no_weights(case: Case, harness: RolloutHarness, when: str) -> None:
    expect_rollout_error(
        lambda: case.rollout.generate_sequences(harness.prompts(4), SamplingParams(2)),
        "load_weights",
        f"the rollout generated {when}",
    )


def digests_match_the_weights(harness: RolloutHarness) -> None:
    """weight_digests() returns the names and digests of the loaded tensors, even after the weights were replaced."""
    for dtype in ("float32", "bfloat16"):
        case = harness.empty_case(dtype=dtype)
        expect_rollout_error(case.rollout.weight_digests, "load_weights", "digests were returned without weights")
        for weights in (case.weights(), case.other_weights(), case.weights()):
            sent_weights = [(name, _cast(case.rollout, name, weight)) for name, weight in weights]
            case.rollout.load_weights(sent_weights)
            actual, expected = case.rollout.weight_digests(), {name: digest(weight) for name, weight in sent_weights}
            names = sorted(actual.keys() ^ expected.keys())
            expect(not names, f"these names have a digest or were loaded, but not both: {names}")
            names = [name for name in expected if actual[name] != expected[name]]
            expect(not names, f"{dtype}: the digests of {', '.join(names[:4])} differ from those of the sent tensors")


def digests_detect_a_transposed_weight(harness: RolloutHarness) -> None:
    """Transposing a square weight changes only its own digest. Loading the same weights after sleep gives the same
    digests."""
    case = harness.case()
    name = next(name for name, weight in case.weights() if weight.ndim == 2 and weight.shape[0] == weight.shape[1])
    before = dict(case.rollout.weight_digests())
    weights = {n: weight.detach() for n, weight in case.weights()}
    case.rollout.load_weights((weights | {name: weights[name].t().contiguous()}).items())
    after = dict(case.rollout.weight_digests())
    names = {n for n in before if before[n] != after[n]}
    expect(names == {name}, f"'{name}' was transposed, but the digests of {sorted(names)} changed")
    case.rollout.sleep()
    expect_rollout_error(case.rollout.weight_digests, "wake_up", "digests were returned while asleep")
    case.rollout.wake_up()
    case.rollout.load_weights(case.weights())
    expect(dict(case.rollout.weight_digests()) == before, "after sleep, the same weights have different digests")


def _cast(rollout: BaseRollout, name: str, weight: Tensor) -> Tensor:
    """Cast a weight to the dtype in which the weight sync sends it."""
    return weight.detach().to(rollout.sync_dtype(name, weight))


def half_precision_is_close(harness: RolloutHarness) -> None:
    """With dtype=bfloat16, the rollout accepts and rounds float32 weights, and log-probs are close to those in
    float32."""
    case, prompts, sampling = harness.empty_case(dtype="bfloat16"), harness.prompts(4, 9, 12), SamplingParams(12)
    for weight in case.oracle.parameters():
        weight.data /= 4 if weight.ndim > 1 else 1
    case.rollout.load_weights(case.weights())
    out = case.rollout.generate_sequences(prompts, sampling)
    expected = case.log_probs(prompts, out.responses, sampling)
    mean = (out.log_probs.values.double() - expected.values).abs().mean().item()
    expect(mean < 2e-2, f"log-probs in bfloat16 are off by {mean:.1e} on average")
