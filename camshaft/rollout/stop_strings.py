"""Detect the token that completes a stop string.

    stops = StopStrings(tokenizer, ("###", "Question:"))
    stops.is_ended_by(response_ids)        # True if the last token completes a stop string

The decoded text excludes the prompt and special tokens, so a stop string that begins in the prompt does not end the
response. The check after each token decodes only the tail of the response.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation

MARGIN = 16
"""Number of characters to decode in addition to the longest string: the first tokens of a tail may decode differently.
"""


class StopStrings:
    """The stop strings of one call and the tokenizer that decodes responses."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]):
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._tail_length = max((len(text) for text in strings), default=0) + MARGIN

    def is_ended_by(self, response: Sequence[int]) -> bool:
        """Return True if the last token of `response` completes a stop string.

        The caller must have checked all shorter prefixes: without its last token, `response` contains no stop string.
        """
        count = self._tail_length
        while True:
            text = self._text(response[-count:])
            if len(text) >= self._tail_length or count >= len(response):
                return any(string in text for string in self._strings)
            count *= 2  # special tokens and incomplete characters decode to no text

    def find_end(self, response: Sequence[int]) -> int | None:
        """Return the number of tokens up to the end of the first stop string, or None if `response` contains none."""
        if not any(string in self._text(response) for string in self._strings):
            return None
        return next((count for count in range(1, len(response) + 1) if self.is_ended_by(response[:count])), None)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)  # pyright: ignore[reportReturnType]


def has_stop(tokens: Sequence[int], stop_ids: Collection[int], stops: StopStrings | None) -> bool:
    """Return True if `tokens` contain a stop token or a stop string."""
    return not set(stop_ids).isdisjoint(tokens) or (stops is not None and stops.find_end(tokens) is not None)


def truncate_at_stop_strings(generation: Generation, stops: StopStrings, generated: Ragged) -> Generation:
    """Truncate each row after its first stop string, which may begin in the earlier tokens `generated`.

    If the samples of a row do not depend on the other rows, the result equals a generation that stopped at the strings.
    """
    lengths, finished = generation.responses.lengths.clone(), generation.finished.clone()
    for row, (earlier, new) in enumerate(zip(generated.rows(), generation.responses.rows(), strict=True)):
        end = stops.find_end([*earlier.tolist(), *new.tolist()])
        if end is not None:
            lengths[row], finished[row] = end - len(earlier), True
    responses, log_probs = generation.responses.prefix(lengths), generation.log_probs.prefix(lengths)
    metrics = generation.metrics | {"response_tokens": float(lengths.sum())}
    return replace(generation, responses=responses, log_probs=log_probs, finished=finished, metrics=metrics)
