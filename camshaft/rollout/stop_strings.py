"""Strings that end a response: which token completes one of them.

    stops = StopStrings(tokenizer, ("###", "Question:"))
    stops.ended_by(response_ids)           # does the last of these tokens complete a string?

The text is what the tokenizer makes of the response alone, without special tokens: a string that began in the
prompt ends nothing. Asked after each token, this looks at the tail of the response only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from camshaft.rollout.base import Generation

MARGIN = 16
"""Characters before the longest string that are decoded along: a tail may read otherwise where it begins."""


class StopStrings:
    """The strings of one call, and the tokenizer that says what tokens read like."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]):
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._needed = max((len(text) for text in strings), default=0) + MARGIN

    def ended_by(self, response: Sequence[int]) -> bool:
        """Whether a string stands in the text of `response`, which had none before its last token."""
        if not self._strings:
            return False
        count = self._needed
        while True:
            text = self._text(response[-count:])
            if len(text) >= self._needed or count >= len(response):
                return any(string in text for string in self._strings)
            count *= 2  # tokens without a text of their own: special ones, and parts of characters

    def end_of(self, response: Sequence[int]) -> int | None:
        """How many tokens of a whole response are left if it ends with its first string; None if it has none."""
        if not any(string in self._text(response) for string in self._strings):
            return None
        return next((count for count in range(1, len(response) + 1) if self.ended_by(response[:count])), None)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)  # pyright: ignore[reportReturnType]


def cut_at_strings(generation: Generation, stops: StopStrings) -> Generation:
    """Rows that were generated on, as if they had ended; right where a row's samples do not depend on the others."""
    lengths, finished = generation.responses.lengths.clone(), generation.finished.clone()
    for row, tokens in enumerate(generation.responses.rows()):
        end = stops.end_of(tokens.tolist())
        if end is not None:
            lengths[row], finished[row] = end, True
    responses, log_probs = generation.responses.prefix(lengths), generation.log_probs.prefix(lengths)
    metrics = generation.metrics | {"response_tokens": float(lengths.sum())}
    return replace(generation, responses=responses, log_probs=log_probs, finished=finished, metrics=metrics)
