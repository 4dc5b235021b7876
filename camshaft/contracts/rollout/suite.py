"""The contract of `BaseRollout` as a suite of rules that runs on any rollout class.

    for rule in RULES:
        rule.check(RolloutHarness(MyRollout, folder))           # raises Violation
    for verdict in check_rollout(MyRollout, folder): ...        # checks all rules

The oracle runs `transformers` on one row at a time (`harness.py`). A rule is a function of a harness. Its docstring
states the requirement, and reports show its name. `stopping.py` contains the rules about the end of a row,
`continuing.py` those about continued rows, `keeping.py` those about kept rows, `scoring.py` those about log-probs of
given tokens, and `weights.py` those about weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from camshaft.contracts.rollout import continuing, keeping, scoring, weights
from camshaft.contracts.rollout import stopping as ends
from camshaft.contracts.rollout.harness import (
    EOS,
    ROUNDINGS,
    Case,
    RolloutHarness,
    expect_close,
    expect_rollout_error,
)
from camshaft.contracts.rules import Rule, Verdict, expect, make_rules, run_rules
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams

MODEL_TYPES = {
    "qwen2": {},
    "llama": {"tie_embeddings": False},
    "qwen3": {"kv_heads": 4},
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6, "layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Arguments of `make_tiny_model` by model type. The sliding windows are shorter than the sequences."""

SAMPLINGS = (
    SamplingParams(12),
    SamplingParams(12, temperature=0.6),
    SamplingParams(12, top_k=7),
    SamplingParams(12, top_p=0.7),
    SamplingParams(12, temperature=1.4, top_k=20, top_p=0.8),
)


OPTIONAL: dict[str, tuple[SamplingParams, ...]] = {
    "min_p": (
        SamplingParams(12, min_p=0.2),
        SamplingParams(12, temperature=1.5, min_p=0.05, top_k=30, top_p=0.8),
    ),
    "repetition_penalty": (
        SamplingParams(12, repetition_penalty=1.8),
        SamplingParams(12, repetition_penalty=0.6, temperature=0.7, top_p=0.9),
        SamplingParams(12, repetition_penalty=1.5, temperature=0),
    ),
    "presence_penalty": (
        SamplingParams(12, presence_penalty=1.5),
        SamplingParams(12, presence_penalty=-1.0, temperature=0.5),
    ),
    "frequency_penalty": (
        SamplingParams(12, frequency_penalty=1.0, top_k=12),
        SamplingParams(12, frequency_penalty=-0.7, presence_penalty=0.3, repetition_penalty=1.2, temperature=0.8),
    ),
}
"""Settings for each parameter that a rollout must declare to support."""


def greedy_matches_transformers(harness: RolloutHarness) -> None:
    """Greedy tokens equal those of transformers.generate in float32 on one prompt at a time."""
    case, prompts = harness.case(), harness.prompts(1, 5, 17, 9, 5, 2)
    for sampling in (SamplingParams(14, temperature=0), SamplingParams(14, do_sample=False, top_p=0.5)):
        out = case.rollout.generate_sequences(prompts, sampling)
        for row, (prompt, response) in enumerate(zip(prompts.rows(), out.responses.rows(), strict=True)):
            expected = case.generate(prompt, 14, [EOS])
            expect(
                response.tolist() == expected,
                f"row {row}: the response is {response.tolist()}, transformers generates {expected}",
            )
        case.check_log_probs(prompts, out, sampling, "greedy log-probs", harness.tolerance)


def log_probs_match_the_distribution(harness: RolloutHarness) -> None:
    """Log-probs equal those of the oracle after temperature, top_k and top_p. Excluded tokens are never sampled."""
    case, prompts = harness.case(), harness.prompts(3, 8, 8, 20)
    for sampling in SAMPLINGS:
        out = case.rollout.generate_sequences(prompts, sampling)
        case.check_log_probs(prompts, out, sampling, f"log-probs with {sampling}", harness.tolerance)
        dtype = out.log_probs.values.dtype
        expect(dtype == torch.float32, f"log-probs have dtype {dtype}, expected torch.float32")


def optional_sampling_is_applied_or_rejected(harness: RolloutHarness) -> None:
    """With min_p and the penalties, log-probs equal those of the oracle, and greedy decoding selects the most probable
    token. A rollout that does not declare one of them raises an error that contains its name."""
    case, prompts = harness.case(), harness.prompts(3, 30, 30, 20)
    supported = case.rollout.capabilities.sampling
    for name, samplings in OPTIONAL.items():
        for sampling in samplings:
            unsupported = sorted(sampling.optional().keys() - supported)
            if unsupported:
                expect_rollout_error(
                    lambda: case.rollout.generate_sequences(prompts, sampling),  # noqa: B023
                    unsupported[0] if len(unsupported) == 1 else "does not support",
                    f"{sampling} was accepted, but {name} is not declared",
                )
                continue
            out = case.rollout.generate_sequences(prompts, sampling)
            case.check_log_probs(prompts, out, sampling, f"log-probs with {sampling}", harness.tolerance)
            if sampling.greedy:
                _check_most_probable(case, prompts, out, sampling)


def _check_most_probable(case: Case, prompts: Ragged, out: Generation, sampling: SamplingParams) -> None:
    for prompt, response in zip(prompts.rows(), out.responses.rows(), strict=True):
        probs = case.distribution(torch.cat([prompt, response]), sampling, prompt_length=len(prompt))
        expected = probs[len(prompt) - 1 : -1].argmax(-1)
        expect(
            torch.equal(response, expected),
            f"{sampling}: the response is {response.tolist()}, the most probable tokens are {expected.tolist()}",
        )


def frequencies_follow_the_distribution(harness: RolloutHarness) -> None:
    """Over many rows, the frequencies of token pairs follow the distribution (chi-square test with fixed seeds)."""
    case = harness.case(sizes={"vocab_size": 16}, max_num_seqs=512, seed=11)
    prompt = torch.tensor([3, 9, 4])
    for sampling in (
        SamplingParams(2, ignore_eos=True),
        SamplingParams(2, temperature=0.8, top_k=9, top_p=0.9, ignore_eos=True),
    ):
        count = 3000
        out = case.rollout.generate_sequences(Ragged.from_rows([prompt] * count), sampling)
        counts = torch.zeros(16, 16, dtype=torch.float64)
        pairs = out.responses.values.view(count, 2)
        counts.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(count, dtype=torch.float64), accumulate=True)
        first_probs = case.distribution(prompt, sampling)[-1]
        second_probs = [case.distribution(torch.cat([prompt, torch.tensor([t])]), sampling)[-1] for t in range(16)]
        expected = count * first_probs[:, None] * torch.stack(second_probs)
        expect(not bool(counts[expected == 0].any()), f"{sampling}: a pair of probability zero was sampled")
        _check_chi_square(counts.flatten(), expected.flatten(), str(sampling))


def _check_chi_square(counts: torch.Tensor, expected: torch.Tensor, subject: str) -> None:
    # Cells with a small expected count are merged into one.
    is_common = expected >= 5
    counts = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
    expected = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    chi = ((counts - expected) ** 2 / expected).sum().item()
    # The chi-square distribution has mean `freedom` and standard deviation sqrt(2 * freedom).
    limit = freedom + 4.5 * math.sqrt(2 * freedom)
    expect(
        chi < limit,
        f"{subject}: chi-square is {chi:.0f} with {freedom} degrees of freedom, expected less than {limit:.0f}",
    )


def model_types(harness: RolloutHarness) -> None:
    """Tokens and log-probs are correct for model types with grouped-query attention, untied output embeddings, and
    sliding windows."""
    for family, sizes in MODEL_TYPES.items():
        if family in harness.unsupported:
            phrase = harness.unsupported[family]
            expect_rollout_error(lambda: harness.case(family, sizes), phrase, f"{family} was accepted")  # noqa: B023
            continue
        case, prompts = harness.case(family, sizes), harness.prompts(3, 14, 1)
        sampling = SamplingParams(16, temperature=0.9, ignore_eos=True)
        out = case.rollout.generate_sequences(prompts, sampling)
        case.check_log_probs(prompts, out, sampling, f"log-probs of {family}", harness.tolerance)
        out = case.rollout.generate_sequences(prompts, SamplingParams(16, temperature=0))
        for prompt, response in zip(prompts.rows(), out.responses.rows(), strict=True):
            expected = case.generate(prompt, 16, [EOS])
            expect(
                response.tolist() == expected,
                f"{family}: the response is {response.tolist()}, transformers generates {expected}",
            )


def seeds_determine_samples(harness: RolloutHarness) -> None:
    """Calls with equal seeds give equal tokens. Calls with different seeds or without seeds give different tokens."""
    case, prompts, sampling = harness.case(), harness.prompts(4, 9, 4, 6), SamplingParams(12)

    def tokens(seeds: torch.Tensor | None) -> list[int]:
        return case.rollout.generate_sequences(prompts, sampling, seeds).responses.values.tolist()

    seeds, other_seeds = torch.arange(4), torch.arange(4) + 7
    expected = tokens(seeds)
    expect(tokens(other_seeds) != expected, "different seeds gave the same tokens")
    expect(tokens(seeds + 2**44) != expected, "seeds that differ only in their upper 32 bits gave the same tokens")
    expect(tokens(seeds) == expected, "the same seeds gave different tokens")
    expect(tokens(None) != tokens(None), "two calls without seeds gave the same tokens")
    state = torch.random.get_rng_state()
    tokens(seeds)
    expect(torch.equal(state, torch.random.get_rng_state()), "the rollout changed the caller's random state")


def rows_do_not_depend_on_the_batch(harness: RolloutHarness) -> None:
    """The samples of a row depend only on its seed and prompt, not on the other rows or their order."""
    case, sampling = harness.case(), SamplingParams(10, top_p=0.95, ignore_eos=True)
    prompts = harness.prompts(4, 9, 2).select([0, 0, 0, 0, 1, 1, 2, 0])
    seeds = torch.tensor([5, 6, 7, 8, 5, 9, 5, 6])

    def rows(numbers: list[int]) -> list[list[int]]:
        out = case.rollout.generate_sequences(prompts.select(numbers), sampling, seeds[numbers])
        return [row.tolist() for row in out.responses.rows()]

    batched = rows(list(range(8)))
    expect(
        len({tuple(row) for row in batched[:4]}) == 4,
        f"rows with equal prompts and different seeds have equal samples: {batched[:4]}",
    )
    expect(batched[7] == batched[1], "two rows with equal prompts and seeds have different responses")
    single = [rows([number])[0] for number in range(8)]
    expect(single == batched, f"rows generated one at a time are {single}, but in one batch they are {batched}")
    order = [6, 3, 1, 0, 7, 5, 2, 4]
    expect(rows(order) == [batched[number] for number in order], "rows depend on their order in the batch")


def prompts_of_mixed_lengths(harness: RolloutHarness) -> None:
    """Rows are correct and in order if there are more rows than max_num_seqs, repeated prompts, and prompts of 1 to 60
    tokens."""
    lengths = [1, 2, 60, 3, 4, 1, 2, 45, 3, 2, 5, 4, 3, 2]
    prompts = harness.prompts(*lengths).select([0, 1, 2, 2, 3, 3, 3, 3, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12, 13, 2])
    case = harness.case(max_num_seqs=4, max_num_batched_tokens=32)
    sampling = SamplingParams(9, stop_token_ids=tuple(range(10, 20)))
    out = case.rollout.generate_sequences(prompts, sampling)
    case.check_log_probs(prompts, out, sampling, tolerance=harness.tolerance)
    greedy = case.rollout.generate_sequences(prompts, SamplingParams(9, temperature=0))
    for prompt, response in zip(prompts.rows(), greedy.responses.rows(), strict=True):
        expected = case.generate(prompt, 9, [EOS])
        expect(response.tolist() == expected, f"the response is {response.tolist()}, transformers generates {expected}")


def thousands_of_prompts(harness: RolloutHarness) -> None:
    """Rows are correct and in order in a call with 2000 prompts of 1 to 4 tokens and three prompts of up to 900."""
    case = harness.case(max_model_len=1024, max_num_seqs=256, max_num_batched_tokens=2048)
    long_prompts, short_prompts = harness.prompts(900, 511, 700, seed=1), harness.prompts(*[1, 2, 3, 4] * 500)
    prompts = Ragged.concat([short_prompts.select(slice(0, 700)), long_prompts, short_prompts.select(slice(700, 2000))])
    sampling = SamplingParams(4, stop_token_ids=tuple(range(10, 40)))
    out = case.rollout.generate_sequences(prompts, sampling)
    expect(len(out.responses) == 2003, f"{len(out.responses)} responses to 2003 prompts")
    expected = case.untruncated_log_probs(prompts, out.responses)
    allowed = ROUNDINGS * case.rounding(prompts, out.responses, sampling)
    expect_close(out.log_probs, expected, max(harness.tolerance, allowed), "log-probs")


RULES: tuple[Rule[RolloutHarness], ...] = make_rules(
    greedy_matches_transformers, log_probs_match_the_distribution, optional_sampling_is_applied_or_rejected,
    frequencies_follow_the_distribution,
    model_types, seeds_determine_samples, rows_do_not_depend_on_the_batch, prompts_of_mixed_lengths,
    thousands_of_prompts,
    ends.rows_end, ends.stop_strings_end_a_row, ends.end_of_sequence_ends_a_row, ends.max_model_len_ends_a_row,
    ends.no_prompts, ends.invalid_prompts_are_rejected,
    continuing.continued_rows_have_the_tokens_of_uninterrupted_ones, continuing.continued_rows_get_new_tokens_only,
    keeping.kept_rows_have_the_tokens_of_computed_ones, keeping.new_weights_end_kept_rows,
    scoring.scores_match_transformers, scoring.scores_and_samples_agree, scoring.scores_follow_the_weights,
    scoring.invalid_scores_are_rejected,
    weights.new_weights_replace_old_ones, weights.tied_weights_load_under_either_name,
    weights.weight_errors_name_the_weight, weights.version_is_that_of_the_weights, weights.generation_needs_weights,
    weights.digests_match_the_weights,
    weights.digests_detect_a_transposed_weight, weights.sleep_and_wake, weights.half_precision_is_close,
)  # fmt: skip


def check_rollout(
    rollout_class: type[BaseRollout], folder: str, rules: Sequence[Rule[RolloutHarness]] = RULES, device: str = "cpu"
) -> Iterator[Verdict]:
    """Check the rules one after another and yield a verdict for each. `folder` is a scratch folder."""
    return run_rules(rules, lambda _: RolloutHarness(rollout_class, folder, device), rollout_class)
