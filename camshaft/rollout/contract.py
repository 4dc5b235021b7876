"""The contract of `BaseRollout` as a suite that runs on anybody's generator.

    for rule in RULES:
        rule.check(RolloutLab(MyRollout, folder))      # raises Violation
    for finding in check_rollout(MyRollout, folder): ... # all of them

The oracle is `transformers` on each row alone (`lab.py` beside this file). A rule is a function of a lab; what
it proves is its docstring, and its name is what a report shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, SamplingParams
from camshaft.rollout.lab import EOS, Case, RolloutLab, close, expect_refusal, off_by
from camshaft.rules import Finding, Rule, expect, rules_of, run_rules

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


# -- what is generated ----------------------------------------------------------------------------


def greedy_is_what_transformers_says(lab: RolloutLab) -> None:
    """Greedy tokens equal those of transformers.generate on each prompt alone, in float32."""
    case, prompts = lab.case(), lab.prompts(1, 5, 17, 9, 5, 2)
    for sampling in (SamplingParams(14, temperature=0), SamplingParams(14, do_sample=False, top_p=0.5)):
        out = case.rollout.generate_sequences(prompts, sampling)
        for row, (prompt, response) in enumerate(zip(prompts.rows(), out.responses.rows(), strict=True)):
            wanted = case.generate(prompt, 14, [EOS])
            expect(response.tolist() == wanted, f"row {row}: {response.tolist()}, transformers says {wanted}")
        close(out.log_probs, case.log_probs(prompts, out.responses, sampling), lab.tolerance, "greedy log-probs")


def log_probs_are_those_of_the_distribution(lab: RolloutLab) -> None:
    """Log-probs are those of a plain forward after temperature, top_k and top_p; nothing cut off is sampled."""
    case, prompts = lab.case(), lab.prompts(3, 8, 8, 20)
    for sampling in WAYS:
        out = case.rollout.generate_sequences(prompts, sampling)
        wanted = case.log_probs(prompts, out.responses, sampling)
        expect(bool(wanted.values.isfinite().all()), f"{sampling}: a token was sampled that should be cut off")
        close(out.log_probs, wanted, lab.tolerance, f"log-probs with {sampling}")
        expect(out.log_probs.values.dtype == torch.float32, f"log-probs are {out.log_probs.values.dtype}")


def frequencies_follow_the_distribution(lab: RolloutLab) -> None:
    """Over many rows, pairs of tokens come as often as the distribution says (chi-square, fixed seeds)."""
    case = lab.case(sizes={"vocab_size": 16}, max_num_seqs=512, seed=11)
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


def families(lab: RolloutLab) -> None:
    """The same holds for several model families, with grouped heads, untied output and sliding windows."""
    for family, sizes in FAMILIES.items():
        case, prompts = lab.case(family, sizes), lab.prompts(3, 14, 1)
        sampling = SamplingParams(16, temperature=0.9, ignore_eos=True)
        out = case.rollout.generate_sequences(prompts, sampling)
        close(out.log_probs, case.log_probs(prompts, out.responses, sampling), lab.tolerance, f"log-probs of {family}")
        out = case.rollout.generate_sequences(prompts, SamplingParams(16, temperature=0))
        for prompt, response in zip(prompts.rows(), out.responses.rows(), strict=True):
            wanted = case.generate(prompt, 16, [EOS])
            expect(response.tolist() == wanted, f"{family}: {response.tolist()}, transformers says {wanted}")


def seeds_decide(lab: RolloutLab) -> None:
    """Equal calls with equal seeds give equal tokens, other seeds others; calls without seeds differ."""
    case, prompts, sampling = lab.case(), lab.prompts(4, 9, 4, 6), SamplingParams(12)

    def tokens(seeds: torch.Tensor | None) -> list[int]:
        return case.rollout.generate_sequences(prompts, sampling, seeds).responses.values.tolist()

    one, two = torch.arange(4), torch.arange(4) + 7
    first = tokens(one)
    expect(tokens(two) != first, "other seeds gave the same tokens")
    expect(tokens(one) == first, "the same seeds gave other tokens")
    expect(tokens(None) != tokens(None), "two calls without seeds gave the same tokens")
    before = torch.random.get_rng_state()
    tokens(one)
    expect(torch.equal(before, torch.random.get_rng_state()), "the caller's random state was changed")


# -- where rows end -------------------------------------------------------------------------------


def rows_end(lab: RolloutLab) -> None:
    """A row ends with its first stop token, which is kept, or at max_tokens; `finished` says which."""
    case, prompts = lab.case(), lab.prompts(*[4] * 12)
    stops = tuple(range(10, 40))
    for sampling in (
        SamplingParams(10, stop_token_ids=stops),
        SamplingParams(10, stop_token_ids=stops, ignore_eos=True),
        SamplingParams(10, ignore_eos=True),
        SamplingParams(1, stop_token_ids=stops),
    ):
        out = case.rollout.generate_sequences(prompts, sampling)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        expect(len(out.responses) == 12 and out.finished.shape == (12,), f"not one response per prompt: {out}")
        for row, finished in zip(out.responses.rows(), out.finished.tolist(), strict=True):
            tokens = row.tolist()
            expect(not ends & set(tokens[:-1]), f"{sampling}: a row went on after a stop token: {tokens}")
            expect(finished == (tokens[-1] in ends), f"{sampling}: finished={finished} for {tokens}")
            expect(finished or len(tokens) == sampling.max_tokens, f"{sampling}: {len(tokens)} tokens, no end")


def the_models_own_end_is_honoured(lab: RolloutLab) -> None:
    """A row that greedily says the end-of-sequence token ends there; with ignore_eos it goes on."""
    case = lab.empty_case(sizes={"tie_embeddings": False})
    head = case.plain.get_output_embeddings().weight
    head.data[EOS] = head.data.abs().sum(dim=0)
    head.data[3:] = -head.data[EOS]
    # Now of any hidden state either EOS or all of the tokens from 3 on have the largest logit.
    case.rollout.load_weights(case.weights())
    prompts = lab.prompts(*range(1, 11))
    out = case.rollout.generate_sequences(prompts, SamplingParams(6, temperature=0))
    expect(bool(out.finished.any()), "no row ended, though some say the end-of-sequence token")
    for prompt, response in zip(prompts.rows(), out.responses.rows(), strict=True):
        wanted = case.generate(prompt, 6, [EOS])
        expect(response.tolist() == wanted, f"{response.tolist()}, transformers says {wanted}")
    longer = case.rollout.generate_sequences(prompts, SamplingParams(6, temperature=0, ignore_eos=True))
    expect(longer.responses.lengths.tolist() == [6] * 10, f"ignore_eos gave {longer.responses.lengths.tolist()} tokens")
    expect(not bool(longer.finished.any()), "rows are called finished that went on to max_tokens")


def max_model_len_ends_a_row(lab: RolloutLab) -> None:
    """Prompt and response together never exceed max_model_len, row by row."""
    case = lab.case(max_model_len=20)
    prompts = lab.prompts(3, 19, 12, 1)
    out = case.rollout.generate_sequences(prompts, SamplingParams(10, ignore_eos=True))
    expect(out.responses.lengths.tolist() == [10, 1, 8, 10], f"response lengths {out.responses.lengths.tolist()}")


def many_short_and_a_few_long_prompts(lab: RolloutLab) -> None:
    """Fewer places than rows, equal and different prompts, lengths from 1 to 60: rows are right and in order."""
    lengths = [1, 2, 60, 3, 4, 1, 2, 45, 3, 2, 5, 4, 3, 2]
    prompts = lab.prompts(*lengths).select([0, 1, 2, 2, 3, 3, 3, 3, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12, 13, 2])
    case = lab.case(max_num_seqs=4, max_num_batched_tokens=32)
    sampling = SamplingParams(9, stop_token_ids=tuple(range(10, 20)))
    out = case.rollout.generate_sequences(prompts, sampling)
    close(out.log_probs, case.log_probs(prompts, out.responses, sampling), lab.tolerance, "log-probs")
    greedy = case.rollout.generate_sequences(prompts, SamplingParams(9, temperature=0))
    for prompt, response in zip(prompts.rows(), greedy.responses.rows(), strict=True):
        wanted = case.generate(prompt, 9, [EOS])
        expect(response.tolist() == wanted, f"{response.tolist()}, transformers says {wanted}")


def no_prompts(lab: RolloutLab) -> None:
    """No prompts give no responses."""
    out = lab.case().rollout.generate_sequences(lab.prompts(), SamplingParams(4))
    expect(len(out.responses) == len(out.log_probs) == len(out.finished) == 0, f"no prompts gave {out}")


def bad_prompts_are_refused(lab: RolloutLab) -> None:
    """An empty prompt, one that leaves no room, one with unknown tokens: an error that names row and value."""
    case = lab.case(max_model_len=20)

    def generate(prompts: Ragged) -> None:
        case.rollout.generate_sequences(prompts, SamplingParams(4))

    empty = Ragged.from_rows([torch.tensor([5]), torch.tensor([], dtype=torch.int64)])
    expect_refusal(lambda: generate(empty), "row 1", "an empty prompt was taken")
    expect_refusal(
        lambda: generate(lab.prompts(3, 4, 20)), "row 2 has a prompt of 20 tokens", "a long prompt was taken"
    )
    unknown = Ragged.from_rows([[5], [6, 7000]])
    expect_refusal(lambda: generate(unknown), "token id 7000", "an unknown token was taken")


# -- weights --------------------------------------------------------------------------------------


def the_last_weights_count(lab: RolloutLab) -> None:
    """After a second load_weights log-probs are those of the new weights; stale ones would be far off."""
    case, prompts, sampling = lab.case(), lab.prompts(4, 9), SamplingParams(12)
    before = case.rollout.generate_sequences(prompts, sampling)
    old = case.log_probs(prompts, before.responses, sampling)
    close(before.log_probs, old, lab.tolerance, "log-probs of the first weights")
    case.rollout.load_weights(case.other_weights())
    after = case.rollout.generate_sequences(prompts, sampling)
    stale = off_by(after.log_probs, case.log_probs(prompts, after.responses, sampling))
    expect(stale > 0.1, f"the log-probs are still those of the first weights (off by {stale:.1e})")
    for weight, (_, new) in zip(case.plain.parameters(), case.other_weights(), strict=True):
        weight.data = new
    close(
        after.log_probs, case.log_probs(prompts, after.responses, sampling), lab.tolerance, "log-probs after the load"
    )


def tied_weights_come_once_or_twice(lab: RolloutLab) -> None:
    """A tied output weight may be left out, come instead of the embedding, or come beside it."""
    case, prompts = lab.empty_case(), lab.prompts(4, 9)
    inner, outer = "model.embed_tokens.weight", "lm_head.weight"
    weights = dict(case.weights())
    renamed = {outer if name == inner else name: weight for name, weight in weights.items()}
    for sent in (weights, renamed, weights | renamed):
        case.rollout.load_weights(iter(sent.items()))
        out = case.rollout.generate_sequences(prompts, SamplingParams(6))
        close(out.log_probs, case.log_probs(prompts, out.responses, SamplingParams(6)), lab.tolerance, "log-probs")


def weights_that_do_not_fit_are_named(lab: RolloutLab) -> None:
    """A missing, an unknown and a misshapen weight are errors that name it, and leave nothing to generate with."""
    case = lab.case()
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
        _refuses_to_generate(case, lab, f"after a {kind} weight")
    case.rollout.load_weights(case.weights())
    case.rollout.generate_sequences(lab.prompts(4), SamplingParams(2))


def weights_come_before_tokens(lab: RolloutLab) -> None:
    """Without weights there is an error that says to load them."""
    _refuses_to_generate(lab.empty_case(), lab, "before load_weights")


def sleep_and_wake(lab: RolloutLab) -> None:
    """Asleep it refuses, awake it wants weights again, and then it generates as before."""
    case, prompts = lab.case(), lab.prompts(4, 9)
    before = case.rollout.generate_sequences(prompts, SamplingParams(8, temperature=0))
    for _ in range(2):
        case.rollout.sleep()
        expect_refusal(
            lambda: case.rollout.generate_sequences(prompts, SamplingParams(8)), "wake_up", "it generated while asleep"
        )
        case.rollout.wake_up()
        _refuses_to_generate(case, lab, "after sleep() and wake_up()")
        case.rollout.load_weights(case.weights())
        after = case.rollout.generate_sequences(prompts, SamplingParams(8, temperature=0))
        expect(torch.equal(after.responses.values, before.responses.values), "it generates other tokens after sleep")
    case.rollout.wake_up()
    case.rollout.generate_sequences(prompts, SamplingParams(2))


def _refuses_to_generate(case: Case, lab: RolloutLab, when: str) -> None:
    expect_refusal(
        lambda: case.rollout.generate_sequences(lab.prompts(4), SamplingParams(2)),
        "load_weights",
        f"it generated {when}",
    )


def half_precision_is_near(lab: RolloutLab) -> None:
    """With dtype=bfloat16, float32 weights are rounded on arrival, and log-probs stay near those of float32."""
    case, prompts, sampling = lab.empty_case(dtype="bfloat16"), lab.prompts(4, 9, 12), SamplingParams(12)
    for weight in case.plain.parameters():
        weight.data /= 4 if weight.ndim > 1 else 1
    case.rollout.load_weights(case.weights())
    out = case.rollout.generate_sequences(prompts, sampling)
    wanted = case.log_probs(prompts, out.responses, sampling)
    mean = (out.log_probs.values.double() - wanted.values).abs().mean().item()
    expect(mean < 2e-2, f"log-probs in bfloat16 are off by {mean:.1e} on average")


RULES: tuple[Rule[RolloutLab], ...] = rules_of(
    greedy_is_what_transformers_says, log_probs_are_those_of_the_distribution, frequencies_follow_the_distribution,
    families, seeds_decide, rows_end, the_models_own_end_is_honoured, max_model_len_ends_a_row,
    many_short_and_a_few_long_prompts, no_prompts, bad_prompts_are_refused, the_last_weights_count,
    tied_weights_come_once_or_twice, weights_that_do_not_fit_are_named, weights_come_before_tokens, sleep_and_wake,
    half_precision_is_near,
)  # fmt: skip


def check_rollout(
    rollout_class: type[BaseRollout], folder: str, rules: Sequence[Rule[RolloutLab]] = RULES, device: str = "cpu"
) -> Iterator[Finding]:
    """Try the rules in `folder` (a scratch place), each finding as it is made."""
    return run_rules(rules, lambda _: RolloutLab(rollout_class, folder, device))
