"""Detect the token that completes a stop string.

    stops = StopStrings(tokenizer, ("###", "Question:"))
    stops.ended_by(response_ids)           # True if the last token completes a string

The text is the decoded response without the prompt and without special tokens, so a string that begins in the prompt
does not end the response. The check after each token decodes only the tail of the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from camshaft.rollout.base import Generation

MARGIN = 16
"""Extra characters decoded before the longest string, because the first tokens of a tail may decode differently."""


class StopStrings:
    """The stop strings of one call and the tokenizer that decodes responses."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]):
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._tail_length = max((len(text) for text in strings), default=0) + MARGIN

    def ended_by(self, response: Sequence[int]) -> bool:
        """Return True if the text of `response` contains a string. Without its last token it must contain none."""
        if not self._strings:
            return False
        count = self._tail_length
        while True:
            text = self._text(response[-count:])
            if len(text) >= self._tail_length or count >= len(response):
                return any(string in text for string in self._strings)
            count *= 2  # special tokens and parts of characters have no text

    def end_of(self, response: Sequence[int]) -> int | None:
        """Return the number of tokens up to the end of the first stop string, or None if it contains none."""
        if not any(string in self._text(response) for string in self._strings):
            return None
        return next((count for count in range(1, len(response) + 1) if self.ended_by(response[:count])), None)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)  # pyright: ignore[reportReturnType]


def cut_at_strings(generation: Generation, stops: StopStrings) -> Generation:
    """Truncate rows after their first stop string.

    The result equals generation that stops there if the samples of a row do not depend on the other rows.
    """
    lengths, finished = generation.responses.lengths.clone(), generation.finished.clone()
    for row, tokens in enumerate(generation.responses.rows()):
        end = stops.end_of(tokens.tolist())
        if end is not None:
            lengths[row], finished[row] = end, True
    responses, log_probs = generation.responses.prefix(lengths), generation.log_probs.prefix(lengths)
    metrics = generation.metrics | {"response_tokens": float(lengths.sum())}
    return replace(generation, responses=responses, log_probs=log_probs, finished=finished, metrics=metrics)
