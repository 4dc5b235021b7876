"""Rules of the rollout contract about rows that are continued with `generated`. `suite.py` lists them.

They do not apply to a rollout that has no argument `generated` and does not declare `continues_rows`.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch

from camshaft.contracts.rollout.harness import (
    ROUNDINGS,
    Case,
    RolloutHarness,
    check_with_seeds,
    expect_close,
    expect_rollout_error,
)
from camshaft.contracts.rules import expect
from camshaft.rollout.base import RESPONSE_OPTIONS, BaseRollout, SamplingParams

LENGTH = 12
"""Number of tokens of an uninterrupted response."""

SAMPLINGS = (
    SamplingParams(LENGTH),
    SamplingParams(LENGTH, temperature=1.3, top_k=20, top_p=0.9, stop_token_ids=tuple(range(10, 20))),
    SamplingParams(LENGTH, temperature=0),
)

OPTIONAL_SAMPLINGS = (
    SamplingParams(LENGTH, presence_penalty=1.5),
    SamplingParams(LENGTH, frequency_penalty=1.0, min_p=0.02),
    SamplingParams(LENGTH, repetition_penalty=1.5, presence_penalty=-0.5, top_p=0.95),
    SamplingParams(LENGTH, repetition_penalty=1.3, frequency_penalty=0.6, temperature=0),
)


def continued_rows_have_the_tokens_of_uninterrupted_ones(harness: RolloutHarness) -> None:
    """A row that is interrupted after any number of tokens and continued has the tokens of an uninterrupted one, with
    all supported sampling parameters and with a stop string that begins in the earlier tokens. Log-probs differ by
    rounding errors. This applies if the rollout declares `continues_rows`."""
    case = harness.case(max_num_seqs=64)
    capabilities = case.rollout.capabilities
    if not capabilities.continues_rows:
        return
    expect(_takes_generated(case.rollout), "continues_rows is declared, but generate_sequences() has no `generated`")
    samplings = [*SAMPLINGS, *(one for one in OPTIONAL_SAMPLINGS if one.optional().keys() <= capabilities.sampling)]
    check_with_seeds(lambda seed: _check_continued(harness, case, samplings, seed))


def _check_continued(harness: RolloutHarness, case: Case, samplings: list[SamplingParams], seed: int) -> None:
    """Raise `Violation` unless rows that are interrupted after 0, 1, ... tokens equal the uninterrupted rows."""
    cuts = torch.arange(LENGTH + 1).repeat(3)
    numbers = torch.arange(3).repeat_interleave(LENGTH + 1)
    prompts, seeds = harness.prompts(4, 9, 2).select(numbers), numbers + seed
    free = case.rollout.generate_sequences(prompts, SamplingParams(LENGTH, ignore_eos=True), seeds).responses.rows()
    stop = case.text(free[0].tolist()[4:8])
    for sampling in (*samplings, SamplingParams(LENGTH, ignore_eos=True, stop=(stop, "never said"))):
        full = case.rollout.generate_sequences(prompts, sampling, seeds)
        lengths = full.responses.lengths.minimum(cuts)
        rest = case.rollout.generate_sequences(prompts, sampling, seeds, generated=full.responses.prefix(lengths))
        expected = full.responses.suffix(full.responses.lengths - lengths)
        for cut, tokens, new in zip(lengths.tolist(), expected.rows(), rest.responses.rows(), strict=True):
            expect(
                torch.equal(new, tokens),
                f"{sampling}: after {cut} tokens, the new tokens are {new.tolist()}, without an interruption they are "
                f"{tokens.tolist()}",
            )
        expect(torch.equal(rest.finished, full.finished), f"{sampling}: `finished` differs in continued rows")
        allowed = max(harness.tolerance, 2 * ROUNDINGS * case.rounding(prompts, full.responses, sampling))
        log_probs = full.log_probs.suffix(expected.lengths)
        expect_close(rest.log_probs, log_probs, allowed, f"log-probs of continued rows with {sampling}")


def continued_rows_get_new_tokens_only(harness: RolloutHarness) -> None:
    """A continued row returns only new tokens and their log-probs. max_tokens and max_model_len limit the entire row. A
    row that its earlier tokens end gets no tokens. A rollout that does not declare `continues_rows` rejects sampling
    parameters that depend on the response, with an error that contains the name of the parameter."""
    case = harness.case(max_model_len=20)
    if not _takes_generated(case.rollout):
        return
    prompts, cuts = harness.prompts(3, 3, 12, 12, 5, 5, 5), torch.tensor([0, 4, 7, 8, 10, 6, 3])
    sampling = SamplingParams(10, temperature=0, ignore_eos=True)
    full = case.rollout.generate_sequences(prompts, sampling)
    generated = full.responses.prefix(cuts)
    rest = case.rollout.generate_sequences(prompts, sampling, generated=generated)
    expected = [row[cut:].tolist() for row, cut in zip(full.responses.rows(), cuts.tolist(), strict=True)]
    new = [row.tolist() for row in rest.responses.rows()]
    expect(new == expected, f"after {cuts.tolist()} greedy tokens, the new tokens are {new}, expected {expected}")
    expect(torch.equal(rest.log_probs.lengths, rest.responses.lengths), "log-probs and new tokens are not aligned")
    expect(not bool(rest.finished.any()), "rows that reached their limit are marked as finished")
    stopped = replace(sampling, stop_token_ids=(int(generated.rows()[5][-1]),))
    out = case.rollout.generate_sequences(prompts.select([5, 4]), stopped, generated=generated.select([5, 4]))
    lengths, finished = out.responses.lengths.tolist(), out.finished.tolist()
    expect(
        lengths == [0, 0] and finished[0],
        f"rows whose earlier tokens end with a stop token or at max_tokens get {lengths} tokens, finished={finished}",
    )
    if case.rollout.capabilities.continues_rows:
        return
    for name in RESPONSE_OPTIONS:
        option = replace(sampling, **{name: ("x",) if name == "stop" else 0.5})
        expect_rollout_error(
            lambda: case.rollout.generate_sequences(prompts, option, generated=generated),  # noqa: B023
            name,
            f"{name} was accepted in continued rows, but continues_rows is not declared",
        )


def _takes_generated(rollout: BaseRollout) -> bool:
    parameters = inspect.signature(rollout.generate_sequences).parameters.values()
    return any(parameter.name == "generated" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
