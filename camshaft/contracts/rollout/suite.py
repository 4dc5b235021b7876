"""The contract of `BaseRollout` as a suite that runs on any rollout class.

    for rule in RULES:
        rule.check(RolloutHarness(MyRollout, folder))      # raises Violation
    for finding in check_rollout(MyRollout, folder): ... # all of them

The oracle is `transformers` on one row at a time (`harness.py`). A rule is a function of a harness. Its docstring is
its meaning, and reports show its name. `stopping.py` has the rules about the end of a row, and `weights.py` those about
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from camshaft.contracts.rollout import stopping as ends
from camshaft.contracts.rollout import weights
from camshaft.contracts.rollout.harness import EOS, ROUNDINGS, RolloutHarness, close, expect_rollout_error
from camshaft.contracts.rules import Finding, Rule, expect, rules_of, run_rules
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, SamplingParams

MODEL_TYPES = {
    "qwen2": {},
    "llama": {"tie_embeddings": False},
    "qwen3": {"kv_heads": 4},
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6, "layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Arguments of tiny models by model type. The sliding windows are shorter than the sequences."""

SAMPLINGS = (
    SamplingParams(12),
    SamplingParams(12, temperature=0.6),
    SamplingParams(12, top_k=7),
    SamplingParams(12, top_p=0.7),
    SamplingParams(12, temperature=1.4, top_k=20, top_p=0.8),
)


def greedy_matches_transformers(harness: RolloutHarness) -> None:
    """In float32, greedy tokens match those of transformers.generate on one prompt at a time."""
    case, prompts = harness.case(), harness.prompts(1, 5, 17, 9, 5, 2)
    for sampling in (SamplingParams(14, temperature=0), SamplingParams(14, do_sample=False, top_p=0.5)):
        out = case.rollout.generate_sequences(prompts, sampling)
        for row, (prompt, response) in enumerate(zip(prompts.rows(), out.responses.rows(), strict=True)):
            expected = case.generate(prompt, 14, [EOS])
            expect(response.tolist() == expected, f"row {row}: {response.tolist()}, transformers generates {expected}")
        case.check_log_probs(prompts, out, sampling, "greedy log-probs", harness.tolerance)


def log_probs_match_the_distribution(harness: RolloutHarness) -> None:
    """Log-probs match those of the oracle after temperature, top_k and top_p. Excluded tokens are never sampled."""
    case, prompts = harness.case(), harness.prompts(3, 8, 8, 20)
    for sampling in SAMPLINGS:
        out = case.rollout.generate_sequences(prompts, sampling)
        case.check_log_probs(prompts, out, sampling, f"log-probs with {sampling}", harness.tolerance)
        expect(out.log_probs.values.dtype == torch.float32, f"log-probs are {out.log_probs.values.dtype}")


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
        first = case.distribution(prompt, sampling)[-1]
        second = [case.distribution(torch.cat([prompt, torch.tensor([t])]), sampling)[-1] for t in range(16)]
        expected = count * first[:, None] * torch.stack(second)
        expect(not bool(counts[expected == 0].any()), f"{sampling}: a pair of probability zero was sampled")
        _check_chi_square(counts.flatten(), expected.flatten(), str(sampling))


def _check_chi_square(counts: torch.Tensor, expected: torch.Tensor, subject: str) -> None:
    # Cells with a small expected count are merged into one.
    common = expected >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    chi = ((counts - expected) ** 2 / expected).sum().item()
    # Mean and standard deviation of chi-square are `freedom` and sqrt(2 * freedom).
    expect(
        chi < freedom + 4.5 * math.sqrt(2 * freedom), f"{subject}: chi-square {chi:.0f} at {freedom} degrees of freedom"
    )


def model_types(harness: RolloutHarness) -> None:
    """Tokens and log-probs are correct for models with grouped-query attention, untied output embeddings or sliding
    windows."""
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
            expect(response.tolist() == expected, f"{family}: {response.tolist()}, transformers generates {expected}")


def seeds_determine_samples(harness: RolloutHarness) -> None:
    """Calls with equal seeds return equal tokens. Calls with different seeds, or without seeds, return different
    tokens."""
    case, prompts, sampling = harness.case(), harness.prompts(4, 9, 4, 6), SamplingParams(12)

    def tokens(seeds: torch.Tensor | None) -> list[int]:
        return case.rollout.generate_sequences(prompts, sampling, seeds).responses.values.tolist()

    one, two = torch.arange(4), torch.arange(4) + 7
    first = tokens(one)
    expect(tokens(two) != first, "different seeds gave the same tokens")
    expect(tokens(one + 2**44) != first, "seeds that differ only in their upper 32 bits gave the same tokens")
    expect(tokens(one) == first, "the same seeds gave different tokens")
    expect(tokens(None) != tokens(None), "two calls without seeds gave the same tokens")
    before = torch.random.get_rng_state()
    tokens(one)
    expect(torch.equal(before, torch.random.get_rng_state()), "the caller's random state was changed")


def rows_do_not_depend_on_the_batch(harness: RolloutHarness) -> None:
    """The samples of a row depend only on its seed and prompt, not on the other rows or their order."""
    case, sampling = harness.case(), SamplingParams(10, top_p=0.95, ignore_eos=True)
    prompts = harness.prompts(4, 9, 2).select([0, 0, 0, 0, 1, 1, 2, 0])
    seeds = torch.tensor([5, 6, 7, 8, 5, 9, 5, 6])

    def rows(numbers: list[int]) -> list[list[int]]:
        out = case.rollout.generate_sequences(prompts.select(numbers), sampling, seeds[numbers])
        return [row.tolist() for row in out.responses.rows()]

    batched = rows(list(range(8)))
    expect(len({tuple(row) for row in batched[:4]}) == 4, f"samples of one prompt are equal: {batched[:4]}")
    expect(batched[7] == batched[1], "one prompt with one seed gave two responses in one batch")
    single = [rows([number])[0] for number in range(8)]
    expect(single == batched, f"rows in calls of one row are {single}, in one batch {batched}")
    order = [6, 3, 1, 0, 7, 5, 2, 4]
    expect(rows(order) == [batched[number] for number in order], "rows changed with their order")


def prompts_of_mixed_lengths(harness: RolloutHarness) -> None:
    """With more rows than concurrent sequences, repeated prompts, and prompts of 1 to 60 tokens, all rows are correct
    and in order."""
    lengths = [1, 2, 60, 3, 4, 1, 2, 45, 3, 2, 5, 4, 3, 2]
    prompts = harness.prompts(*lengths).select([0, 1, 2, 2, 3, 3, 3, 3, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12, 13, 2])
    case = harness.case(max_num_seqs=4, max_num_batched_tokens=32)
    sampling = SamplingParams(9, stop_token_ids=tuple(range(10, 20)))
    out = case.rollout.generate_sequences(prompts, sampling)
    case.check_log_probs(prompts, out, sampling, tolerance=harness.tolerance)
    greedy = case.rollout.generate_sequences(prompts, SamplingParams(9, temperature=0))
    for prompt, response in zip(prompts.rows(), greedy.responses.rows(), strict=True):
        expected = case.generate(prompt, 9, [EOS])
        expect(response.tolist() == expected, f"{response.tolist()}, transformers generates {expected}")


def thousands_of_prompts(harness: RolloutHarness) -> None:
    """In one call with 2000 prompts of 1 to 4 tokens and three prompts of up to 900, all rows are correct and in
    order."""
    case = harness.case(max_model_len=1024, max_num_seqs=256, max_num_batched_tokens=2048)
    long, short = harness.prompts(900, 511, 700, seed=1), harness.prompts(*[1, 2, 3, 4] * 500)
    mixed = Ragged.concat([short.select(slice(0, 700)), long, short.select(slice(700, 2000))])
    sampling = SamplingParams(4, stop_token_ids=tuple(range(10, 40)))
    out = case.rollout.generate_sequences(mixed, sampling)
    expect(len(out.responses) == 2003, f"{len(out.responses)} responses to 2003 prompts")
    expected = case.untruncated_log_probs(mixed, out.responses)
    allowed = ROUNDINGS * case.rounding(mixed, out.responses, sampling)
    close(out.log_probs, expected, max(harness.tolerance, allowed), "log-probs")


RULES: tuple[Rule[RolloutHarness], ...] = rules_of(
    greedy_matches_transformers, log_probs_match_the_distribution, frequencies_follow_the_distribution,
    model_types, seeds_determine_samples, rows_do_not_depend_on_the_batch, prompts_of_mixed_lengths,
    thousands_of_prompts,
    ends.rows_end, ends.stop_strings_end_a_row, ends.end_of_sequence_ends_a_row, ends.max_model_len_ends_a_row,
    ends.no_prompts, ends.invalid_prompts_are_rejected,
    weights.new_weights_replace_old_ones, weights.tied_weights_load_under_either_name,
    weights.weight_errors_name_the_weight, weights.generation_needs_weights, weights.digests_match_the_weights,
    weights.digests_detect_a_transposed_weight, weights.sleep_and_wake, weights.half_precision_is_close,
)  # fmt: skip


def check_rollout(
    rollout_class: type[BaseRollout], folder: str, rules: Sequence[Rule[RolloutHarness]] = RULES, device: str = "cpu"
) -> Iterator[Finding]:
    """Check the rules in the scratch folder `folder`, and yield each finding."""
    return run_rules(rules, lambda _: RolloutHarness(rollout_class, folder, device))
