"""Rules of the rollout contract about the log-probs of given tokens (`score`). `suite.py` lists them.

They apply to a rollout that declares `scores_prompts`; any other one must reject `score`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from camshaft.contracts.rollout.harness import (
    ROUNDINGS,
    Case,
    RolloutHarness,
    expect_close,
    expect_rollout_error,
)
from camshaft.contracts.rules import Violation, expect
from camshaft.ragged import Ragged
from camshaft.rollout.base import SamplingParams, UnsupportedSampling
from camshaft.rollout.scoring import PromptScores

TOP_K = 5
AGREEMENT = 1e-5
"""Allowed difference of the log-probs that `score` and `generate_sequences` return for a token in float32."""
LENGTHS = (9, 1, 30, 2, 17, 9)
"""Lengths of the prompts, beside one of the maximum length."""
SAMPLINGS = (
    SamplingParams(12, ignore_eos=True),
    SamplingParams(12, temperature=0.6),
    SamplingParams(12, temperature=1.4, top_k=20, top_p=0.8),
    SamplingParams(12, temperature=0),
)
MODEL_TYPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_embeddings": False},
    "gemma3_text": {"sliding_window": 6, "layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}


def scores_match_transformers(harness: RolloutHarness) -> None:
    """`score` returns the log-prob of each token of a prompt given those before it, the most probable tokens of each
    position, and the log-probs of candidates. They equal those of transformers in float64, also in several model calls
    and for a prompt of the maximum length. The first token of a prompt has none. This applies if the rollout declares
    `scores_prompts`, and to candidates if it declares `scores_candidates`; others reject them."""
    case = harness.case(max_num_batched_tokens=48)
    prompts = harness.prompts(*LENGTHS, case.rollout.max_scored_tokens)
    if not case.rollout.capabilities.scores_prompts:
        expect_rollout_error(
            lambda: case.rollout.score(prompts), "scores_prompts", "score was accepted, but is not declared"
        )
        return
    candidates = prompts.map(lambda ids: torch.stack([ids, (ids * 7 + 5) % 100, torch.full_like(ids, -1)], dim=1))
    scores = case.rollout.score(prompts, TOP_K)
    _check_scores(harness, case, prompts, scores)
    if case.rollout.capabilities.scores_candidates:
        scores = case.rollout.score(prompts, TOP_K, candidates)
        _check_scores(harness, case, prompts, scores)
        _check_candidates(harness, case, prompts, candidates, scores)
    else:
        expect_rollout_error(
            lambda: case.rollout.score(prompts, TOP_K, candidates), "scores_candidates", "candidates were accepted"
        )
    plain = case.rollout.score(prompts)
    _expect_equal(plain.log_probs, scores.log_probs, "log-probs with and without top_k and candidates")
    expect(plain.top_tokens is None and plain.candidate_log_probs is None, "columns that were not requested came")
    expect(len(case.rollout.score(prompts.select(slice(0, 0))).log_probs) == 0, "no prompts have scores")
    for family, sizes in MODEL_TYPES.items():
        if family not in harness.unsupported:
            case = harness.case(family, sizes)
            _check_scores(harness, case, prompts, case.rollout.score(prompts, TOP_K))


def _check_scores(harness: RolloutHarness, case: Case, prompts: Ragged, scores: PromptScores) -> None:
    """Compare log-probs and the most probable tokens with the oracle."""
    expected = _log_distributions(case, prompts)
    tolerance = _tolerance(harness, case, prompts)
    for row, (tokens, log_probs, actual) in enumerate(
        zip(prompts.rows(), expected, scores.log_probs.rows(), strict=True)
    ):
        expect(len(actual) == len(tokens), f"row {row} of {len(tokens)} tokens has {len(actual)} log-probs")
        expect(bool(actual[0].isnan()), f"the first token of row {row} has the log-prob {actual[0]}, expected NaN")
        _expect_close(actual[1:], log_probs.gather(-1, tokens[1:, None])[:, 0], tolerance, f"log-probs of row {row}")
    if scores.top_tokens is None or scores.top_log_probs is None:
        raise Violation("top_k returns no tokens")
    columns = scores.top_tokens.rows(), scores.top_log_probs.rows()
    for row, (log_probs, ids, actual) in enumerate(zip(expected, *columns, strict=True)):
        expect(ids.shape == (len(log_probs) + 1, TOP_K), f"row {row} has top tokens of shape {tuple(ids.shape)}")
        _expect_close(actual[1:], log_probs.topk(TOP_K).values, tolerance, f"the top log-probs of row {row}")
        _expect_close(actual[1:], log_probs.gather(-1, ids[1:]), tolerance, f"log-probs of the top tokens of row {row}")


def _check_candidates(
    harness: RolloutHarness, case: Case, prompts: Ragged, candidates: Ragged, scores: PromptScores
) -> None:
    if scores.candidate_log_probs is None:
        raise Violation("candidates have no log-probs")
    tolerance = _tolerance(harness, case, prompts)
    expected = _log_distributions(case, prompts)
    columns = candidates.rows(), scores.candidate_log_probs.rows()
    for row, (log_probs, ids, actual) in enumerate(zip(expected, *columns, strict=True)):
        named = log_probs.gather(-1, ids[1:, :2])
        _expect_close(actual[1:, :2], named, tolerance, f"log-probs of the candidates of row {row}")
        expect(bool(actual[:, 2].isnan().all() and actual[0].isnan().all()), f"row {row}: -1 has a log-prob")


def scores_and_samples_agree(harness: RolloutHarness) -> None:
    """The log-probs that `score` returns for the tokens of a sample, with the same sampling options, are those of the
    sample, within 1e-5 in float32; without options, they are those at temperature 1. Scoring changes neither later
    samples nor kept rows. This applies if the rollout declares `scores_prompts`, except for options that it rejects."""
    case, prompts = harness.case(), harness.prompts(3, 8, 1, 20)
    if not case.rollout.capabilities.scores_prompts:
        return
    seeds = torch.arange(len(prompts))
    for sampling in SAMPLINGS:
        out = case.rollout.generate_sequences(prompts, sampling, seeds)
        rows = Ragged.join(prompts, out.responses)
        try:
            scores = case.rollout.score(rows, sampling=sampling)
        except UnsupportedSampling:
            expect(sampling != SAMPLINGS[0], "score rejects the distribution of the model at temperature 1")
            continue
        allowed = max(AGREEMENT, 2 * ROUNDINGS * case.rounding(prompts, out.responses, sampling))
        actual = scores.log_probs.suffix(out.responses.lengths)
        expect_close(actual, out.log_probs, allowed, f"log-probs of score and of samples with {sampling}")
        again = case.rollout.generate_sequences(prompts, sampling, seeds)
        expect(torch.equal(again.responses.values, out.responses.values), "samples are others after score")
        plain = case.rollout.score(rows).log_probs.suffix(out.responses.lengths)
        expected = case.untruncated_log_probs(prompts, out.responses)
        expect_close(plain, expected, max(harness.tolerance, allowed), "log-probs without options")


def scores_follow_the_weights(harness: RolloutHarness) -> None:
    """After load_weights, `score` returns the log-probs of the new weights, also for prompts that it has scored before.
    A rollout that is asleep or has no weights rejects it. This applies if the rollout declares `scores_prompts`."""
    empty, case, prompts = harness.empty_case(), harness.case(), harness.prompts(6, 11)
    if not case.rollout.capabilities.scores_prompts:
        return
    expect_rollout_error(lambda: empty.rollout.score(prompts), "no weights", "score without weights was accepted")
    before = case.rollout.score(prompts, TOP_K)
    case.rollout.load_weights(case.other_weights())
    with torch.no_grad():
        for (_, weight), (_, other) in zip(case.weights(), case.other_weights(), strict=True):
            weight.copy_(other)
    after = case.rollout.score(prompts, TOP_K)
    _check_scores(harness, case, prompts, after)
    change = (after.log_probs.values - before.log_probs.values).nan_to_num().abs().max()
    expect(float(change) > harness.tolerance, "the new weights have the log-probs of the old ones")
    case.rollout.sleep()
    expect_rollout_error(lambda: case.rollout.score(prompts), "asleep", "score while asleep was accepted")
    case.rollout.wake_up()
    case.rollout.load_weights(case.weights())
    _check_scores(harness, case, prompts, case.rollout.score(prompts, TOP_K))


def invalid_scores_are_rejected(harness: RolloutHarness) -> None:
    """`score` rejects empty and overlong prompts, unknown token ids, a top_k outside the vocabulary, candidates that do
    not match the prompts, and penalties, with errors that contain the value. This applies if the rollout declares
    `scores_prompts`."""
    case = harness.case(max_model_len=16)
    longest = case.rollout.max_scored_tokens
    prompts = harness.prompts(4, longest)
    if not case.rollout.capabilities.scores_prompts:
        return
    score, unknown = case.rollout.score, prompts.map(lambda ids: torch.full_like(ids, 2**20))
    wrong = prompts.map(lambda ids: ids[:, None]).select([1, 0])
    actions: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: score(harness.prompts(4, longest + 1)), f"{longest + 1} tokens"),
        (lambda: score(harness.prompts(4, 0)), "row 1 has an empty prompt"),
        (lambda: score(unknown), str(2**20)),
        (lambda: score(prompts, top_k=-1), "top_k=-1"),
        (lambda: score(prompts, top_k=2**20), str(2**20)),
        (lambda: score(prompts, candidates=wrong), "candidates"),
        (
            lambda: score(prompts, candidates=unknown.map(lambda ids: ids[:, None])),
            str(2**20) if case.rollout.capabilities.scores_candidates else "candidates",
        ),
        (lambda: score(prompts, sampling=replace(SAMPLINGS[0], presence_penalty=0.5)), "presence_penalty=0.5"),
    )
    for number, (action, phrase) in enumerate(actions):
        expect_rollout_error(action, phrase, f"invalid arguments of score were accepted (case {number})")
    score(prompts)


@torch.no_grad()
def _log_distributions(case: Case, prompts: Ragged) -> list[Tensor]:
    """Return the float64 log-probs (T - 1, V) of the vocabulary at each position of a row but the first."""
    model = case.double()
    return [case.logits(model, tokens[None])[0, :-1].log_softmax(-1) for tokens in prompts.rows()]


def _tolerance(harness: RolloutHarness, case: Case, prompts: Ragged) -> float:
    longer = prompts.select((prompts.lengths > 1).nonzero()[:, 0])
    first, rest = longer.prefix(torch.ones_like(longer.lengths)), longer.suffix(longer.lengths - 1)
    return max(harness.tolerance, ROUNDINGS * case.rounding(first, rest, SamplingParams(1)))


def _expect_close(actual: Tensor, expected: Tensor, tolerance: float, subject: str) -> None:
    difference = float((actual.double() - expected).abs().max()) if actual.numel() else 0.0
    expect(difference <= tolerance, f"{subject} are off by {difference:.2e}, the tolerance is {tolerance:.2e}")


def _expect_equal(actual: Ragged, expected: Ragged, subject: str) -> None:
    same = torch.equal(actual.values.nan_to_num(), expected.values.nan_to_num())
    expect(same, f"{subject} differ")
