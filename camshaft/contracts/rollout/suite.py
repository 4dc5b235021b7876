"""The contract of `BaseRollout` as a suite that runs on anybody's generator.

    for rule in RULES:
        rule.check(RolloutHarness(MyRollout, folder))      # raises Violation
    for finding in check_rollout(MyRollout, folder): ... # all of them

The oracle is `transformers` on each row alone (`harness.py` beside this file). A rule is a function of a harness; what
it proves is its docstring, and its name is what a report shows. `stopping.py` and `weights.py` have
those about where rows end and about weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from camshaft.contracts.rollout import stopping as ends
from camshaft.contracts.rollout import weights
from camshaft.contracts.rollout.harness import EOS, ROUNDINGS, RolloutHarness, close, expect_refusal
from camshaft.contracts.rules import Finding, Rule, expect, rules_of, run_rules
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, SamplingParams

FAMILIES = {
    "qwen2": {},
    "llama": {"tie_embeddings": False},
    "qwen3": {"kv_heads": 4},
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6, "layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Model types, the last two with a sliding window that is shorter than the sequences."""

WAYS = (
    SamplingParams(12),
    SamplingParams(12, temperature=0.6),
    SamplingParams(12, top_k=7),
    SamplingParams(12, top_p=0.7),
    SamplingParams(12, temperature=1.4, top_k=20, top_p=0.8),
)


def greedy_is_what_transformers_says(harness: RolloutHarness) -> None:
    """Greedy tokens equal those of transformers.generate on each prompt alone, in float32."""
    case, prompts = harness.case(), harness.prompts(1, 5, 17, 9, 5, 2)
    for sampling in (SamplingParams(14, temperature=0), SamplingParams(14, do_sample=False, top_p=0.5)):
        out = case.rollout.generate_sequences(prompts, sampling)
        for row, (prompt, response) in enumerate(zip(prompts.rows(), out.responses.rows(), strict=True)):
            wanted = case.generate(prompt, 14, [EOS])
            expect(response.tolist() == wanted, f"row {row}: {response.tolist()}, transformers says {wanted}")
        case.check_log_probs(prompts, out, sampling, "greedy log-probs", harness.tolerance)


def log_probs_are_those_of_the_distribution(harness: RolloutHarness) -> None:
    """Log-probs are those of a plain forward after temperature, top_k and top_p; nothing cut off is sampled."""
    case, prompts = harness.case(), harness.prompts(3, 8, 8, 20)
    for sampling in WAYS:
        out = case.rollout.generate_sequences(prompts, sampling)
        case.check_log_probs(prompts, out, sampling, f"log-probs with {sampling}", harness.tolerance)
        expect(out.log_probs.values.dtype == torch.float32, f"log-probs are {out.log_probs.values.dtype}")


def frequencies_follow_the_distribution(harness: RolloutHarness) -> None:
    """Over many rows, pairs of tokens come as often as the distribution says (chi-square, fixed seeds)."""
    case = harness.case(sizes={"vocab_size": 16}, max_num_seqs=512, seed=11)
    prompt = torch.tensor([3, 9, 4])
    for sampling in (
        SamplingParams(2, ignore_eos=True),
        SamplingParams(2, temperature=0.8, top_k=9, top_p=0.9, ignore_eos=True),
    ):
        count = 3000
        out = case.rollout.generate_sequences(Ragged.from_rows([prompt] * count), sampling)
        seen = torch.zeros(16, 16, dtype=torch.float64)
        pairs = out.responses.values.view(count, 2)
        seen.index_put_((pairs[:, 0], pairs[:, 1]), torch.ones(count, dtype=torch.float64), accumulate=True)
        first = case.distribution(prompt, sampling)[-1]
        second = [case.distribution(torch.cat([prompt, torch.tensor([t])]), sampling)[-1] for t in range(16)]
        wanted = count * first[:, None] * torch.stack(second)
        expect(not bool(seen[wanted == 0].any()), f"{sampling}: a pair of probability zero was sampled")
        _chi_square(seen.flatten(), wanted.flatten(), str(sampling))


def _chi_square(seen: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    # Cells where few are expected are counted as one.
    common = wanted >= 5
    seen = torch.cat([seen[common], seen[~common].sum()[None]])
    wanted = torch.cat([wanted[common], wanted[~common].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    chi = ((seen - wanted) ** 2 / wanted).sum().item()
    # Mean and standard deviation of chi-square are `freedom` and sqrt(2 * freedom).
    expect(
        chi < freedom + 4.5 * math.sqrt(2 * freedom), f"{what}: chi-square {chi:.0f} at {freedom} degrees of freedom"
    )


def families(harness: RolloutHarness) -> None:
    """The same holds for several model families, with grouped heads, untied output and sliding windows."""
    for family, sizes in FAMILIES.items():
        if family in harness.refused:
            expect_refusal(lambda: harness.case(family, sizes), harness.refused[family], f"{family} was taken")  # noqa: B023
            continue
        case, prompts = harness.case(family, sizes), harness.prompts(3, 14, 1)
        sampling = SamplingParams(16, temperature=0.9, ignore_eos=True)
        out = case.rollout.generate_sequences(prompts, sampling)
        case.check_log_probs(prompts, out, sampling, f"log-probs of {family}", harness.tolerance)
        out = case.rollout.generate_sequences(prompts, SamplingParams(16, temperature=0))
        for prompt, response in zip(prompts.rows(), out.responses.rows(), strict=True):
            wanted = case.generate(prompt, 16, [EOS])
            expect(response.tolist() == wanted, f"{family}: {response.tolist()}, transformers says {wanted}")


def seeds_decide(harness: RolloutHarness) -> None:
    """Equal calls with equal seeds give equal tokens, other seeds others; calls without seeds differ."""
    case, prompts, sampling = harness.case(), harness.prompts(4, 9, 4, 6), SamplingParams(12)

    def tokens(seeds: torch.Tensor | None) -> list[int]:
        return case.rollout.generate_sequences(prompts, sampling, seeds).responses.values.tolist()

    one, two = torch.arange(4), torch.arange(4) + 7
    first = tokens(one)
    expect(tokens(two) != first, "other seeds gave the same tokens")
    expect(tokens(one + 2**44) != first, "seeds that differ in their upper 32 bits alone gave the same tokens")
    expect(tokens(one) == first, "the same seeds gave other tokens")
    expect(tokens(None) != tokens(None), "two calls without seeds gave the same tokens")
    before = torch.random.get_rng_state()
    tokens(one)
    expect(torch.equal(before, torch.random.get_rng_state()), "the caller's random state was changed")


def a_row_is_the_same_in_any_batch(harness: RolloutHarness) -> None:
    """A row's samples depend on its seed and its prompt alone: n samples of one prompt, other company, other order."""
    case, sampling = harness.case(), SamplingParams(10, top_p=0.95, ignore_eos=True)
    prompts = harness.prompts(4, 9, 2).select([0, 0, 0, 0, 1, 1, 2, 0])
    seeds = torch.tensor([5, 6, 7, 8, 5, 9, 5, 6])

    def rows(chosen: list[int]) -> list[list[int]]:
        out = case.rollout.generate_sequences(prompts.select(chosen), sampling, seeds[chosen])
        return [row.tolist() for row in out.responses.rows()]

    together = rows(list(range(8)))
    expect(len({tuple(row) for row in together[:4]}) == 4, f"samples of one prompt are equal: {together[:4]}")
    expect(together[7] == together[1], "one prompt with one seed gave two responses in one batch")
    alone = [rows([number])[0] for number in range(8)]
    expect(alone == together, f"rows alone are {alone}, together {together}")
    order = [6, 3, 1, 0, 7, 5, 2, 4]
    expect(rows(order) == [together[number] for number in order], "rows changed with their order")


def many_short_and_a_few_long_prompts(harness: RolloutHarness) -> None:
    """Fewer places than rows, equal and different prompts, lengths from 1 to 60: rows are right and in order."""
    lengths = [1, 2, 60, 3, 4, 1, 2, 45, 3, 2, 5, 4, 3, 2]
    prompts = harness.prompts(*lengths).select([0, 1, 2, 2, 3, 3, 3, 3, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12, 13, 2])
    case = harness.case(max_num_seqs=4, max_num_batched_tokens=32)
    sampling = SamplingParams(9, stop_token_ids=tuple(range(10, 20)))
    out = case.rollout.generate_sequences(prompts, sampling)
    case.check_log_probs(prompts, out, sampling, tolerance=harness.tolerance)
    greedy = case.rollout.generate_sequences(prompts, SamplingParams(9, temperature=0))
    for prompt, response in zip(prompts.rows(), greedy.responses.rows(), strict=True):
        wanted = case.generate(prompt, 9, [EOS])
        expect(response.tolist() == wanted, f"{response.tolist()}, transformers says {wanted}")


def thousands_of_short_and_a_few_very_long_prompts(harness: RolloutHarness) -> None:
    """2000 prompts of 1 to 4 tokens and three of up to 900 in one call: all rows are right and in order."""
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
    greedy_is_what_transformers_says, log_probs_are_those_of_the_distribution, frequencies_follow_the_distribution,
    families, seeds_decide, a_row_is_the_same_in_any_batch, many_short_and_a_few_long_prompts,
    thousands_of_short_and_a_few_very_long_prompts,
    ends.rows_end, ends.stop_strings_end_a_row, ends.the_models_own_end_is_honoured, ends.max_model_len_ends_a_row,
    ends.no_prompts, ends.bad_prompts_are_refused,
    weights.the_last_weights_count, weights.tied_weights_come_once_or_twice,
    weights.weights_that_do_not_fit_are_named, weights.weights_come_before_tokens, weights.digests_tell_what_is_held,
    weights.digests_find_a_transposed_weight, weights.sleep_and_wake, weights.half_precision_is_near,
)  # fmt: skip


def check_rollout(
    rollout_class: type[BaseRollout], folder: str, rules: Sequence[Rule[RolloutHarness]] = RULES, device: str = "cpu"
) -> Iterator[Finding]:
    """Try the rules in `folder` (a scratch place), each finding as it is made."""
    return run_rules(rules, lambda _: RolloutHarness(rollout_class, folder, device))
