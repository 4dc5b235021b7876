"""Scores of tokens on hand-worked logits. `camshaft/contracts/rollout/scoring.py` has the rules for rollouts."""

import math

import pytest
import torch

from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams, scoring
from camshaft.rollout.scoring import PromptScores, score_tokens

PROMPTS = Ragged.from_rows([[2, 0, 1], [1], [0, 2]])
LOGITS = torch.tensor([[8, 1, 1], [1, 1, 2], [9, 9, 9], [9, 9, 9], [1, 1, 6], [9, 9, 9]]).log()
"""Logits after each token. Those after the last token of a prompt belong to no token."""


def score(sampling: SamplingParams, top_k: int = 0, candidates: Ragged | None = None) -> PromptScores:
    return score_tokens(PROMPTS, LOGITS, sampling.restrict, top_k, candidates)


def probabilities(column: Ragged | None) -> list[list[float]]:
    assert column is not None
    return [[round(value, 6) for value in row.flatten().exp().tolist()] for row in column.rows()]


def with_nan_as_none(rows: list[list[float]]) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in row] for row in rows]


@pytest.mark.parametrize("chunk", [1, 2**20])
def test_a_token_has_the_log_prob_after_the_one_before_it(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", chunk)
    scores = score(SamplingParams(1))
    assert with_nan_as_none(probabilities(scores.log_probs)) == [[None, 0.8, 0.25], [None], [None, 0.75]]
    assert scores.top_tokens is scores.top_log_probs is scores.candidate_log_probs is None


@pytest.mark.parametrize("chunk", [1, 2**20])
def test_top_tokens_are_in_descending_order(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", chunk)
    scores = score(SamplingParams(1), top_k=1)
    assert scores.top_tokens is not None
    assert [row.flatten().tolist() for row in scores.top_tokens.rows()] == [[-1, 0, 2], [-1], [-1, 2]]
    assert with_nan_as_none(probabilities(scores.top_log_probs)) == [[None, 0.8, 0.5], [None], [None, 0.75]]


def test_candidates_have_log_probs_unless_they_are_minus_one() -> None:
    candidates = Ragged(torch.tensor([[0, 1], [1, -1], [-1, 2], [0, 1], [0, 1], [0, 2]]), PROMPTS.lengths)
    rows = with_nan_as_none(probabilities(score(SamplingParams(1), candidates=candidates).candidate_log_probs))
    assert rows == [[None, None, 0.1, None, None, 0.5], [None, None], [None, None, 0.125, 0.75]]


def test_log_probs_refer_to_the_distribution_of_the_options() -> None:
    half = score(SamplingParams(1, temperature=0.5)).log_probs
    assert with_nan_as_none(probabilities(half)) == [
        [None, round(64 / 66, 6), round(1 / 6, 6)],
        [None],
        [None, 0.947368],
    ]
    best = score(SamplingParams(1, top_k=1)).log_probs
    assert with_nan_as_none(probabilities(best)) == [[None, 1.0, 0.0], [None], [None, 1.0]]
    greedy = score(SamplingParams(1, temperature=0, top_k=1)).log_probs
    assert with_nan_as_none(probabilities(greedy)) == [[None, 0.8, 0.25], [None], [None, 0.75]]
