"""Log-probs of given tokens, computed from the logits of a model call.

    scores = score_tokens(prompts, logits, top_k=5)     # logits (N, V), those after each token
    scores.log_probs                                    # Ragged, one entry per token; NaN for the first ones

`BaseRollout.score` returns them. The distribution of a token is that of the logits after the token before it, as in
sampling, so the first token of a prompt has no scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from camshaft.ragged import Ragged

CHUNK_LOGITS = 2**24
"""Number of logits whose log-probs are computed at once, 64 MB in float32."""
CALL_LOGITS = 2**28
"""Number of logits of a model call on several prompts."""


@dataclass(frozen=True)
class PromptScores:
    """Log-probs of the tokens of prompts, in float32 and aligned with the prompts. Those of first tokens are NaN."""

    log_probs: Ragged
    """Log-prob of each token; -inf for a token that sampling excludes."""
    top_tokens: Ragged | None = None
    """With `top_k`, the most probable token ids (k,) in place of each token, in descending order."""
    top_log_probs: Ragged | None = None
    """Their log-probs (k,)."""
    candidate_log_probs: Ragged | None = None
    """With `candidates`, the log-prob of each candidate (K,) in place of each token; NaN for -1."""

    def map(self, fn: Callable[[Ragged], Ragged]) -> PromptScores:
        """Apply `fn` to each column."""
        optional = (self.top_tokens, self.top_log_probs, self.candidate_log_probs)
        return PromptScores(fn(self.log_probs), *(None if column is None else fn(column) for column in optional))

    def select(self, rows: Tensor) -> PromptScores:
        return self.map(lambda column: column.select(rows))

    def to(self, device: torch.device | str) -> PromptScores:
        return self.map(lambda column: column.to(device))

    @staticmethod
    def concat(parts: Sequence[PromptScores]) -> PromptScores:
        """Concatenate the rows of scores with the same columns."""

        def join(columns: Iterable[Ragged | None]) -> Ragged | None:
            present = [column for column in columns if column is not None]
            return Ragged.concat(present) if present else None

        return PromptScores(
            Ragged.concat([part.log_probs for part in parts]),
            join(part.top_tokens for part in parts),
            join(part.top_log_probs for part in parts),
            join(part.candidate_log_probs for part in parts),
        )


def score_tokens(
    prompts: Ragged,
    logits: Tensor,
    scores_of: Callable[[Tensor], Tensor],
    top_k: int = 0,
    candidates: Ragged | None = None,
) -> PromptScores:
    """Return the scores of packed prompts, given the logits (N, V) after each token.

    `scores_of` maps logits to the scores whose softmax is the distribution. `candidates` contains ids (K,) for each
    token, or -1. The float32 copies of logits are made in chunks, because a vocabulary is large.
    """
    tokens = prompts.values
    predicted = prompts.positions().nonzero()[:, 0]

    def empty(*shape: int) -> Tensor:
        return torch.full((len(tokens), *shape), math.nan, dtype=torch.float32, device=tokens.device)

    log_probs, top_log_probs = empty(), empty(top_k)
    top_tokens = torch.full((len(tokens), top_k), -1, dtype=torch.int64, device=tokens.device)
    ids = None if candidates is None else candidates.values
    candidate_log_probs = None if ids is None else empty(*ids.shape[1:])
    for part in predicted.split(max(1, CHUNK_LOGITS // logits.shape[-1])):
        values = scores_of(logits[part - 1]).log_softmax(-1)
        log_probs[part] = values.gather(-1, tokens[part, None])[:, 0].float()
        if top_k:
            best = values.topk(top_k, dim=-1)
            top_tokens[part], top_log_probs[part] = best.indices, best.values.float()
        if ids is not None and candidate_log_probs is not None:
            chosen = values.gather(-1, ids[part].clamp(min=0)).float()
            candidate_log_probs[part] = chosen.where(ids[part] >= 0, math.nan)
    return PromptScores(
        prompts.like(log_probs),
        prompts.like(top_tokens) if top_k else None,
        prompts.like(top_log_probs) if top_k else None,
        None if candidate_log_probs is None else prompts.like(candidate_log_probs),
    )
