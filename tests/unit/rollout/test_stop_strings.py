"""The token that completes a stop string; the oracle is the text of the full response."""

import random

import pytest
from support.tiny import tiny_tokenizer_folder
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from camshaft.rollout.stop_strings import StopStrings


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_tokenizer_folder())


def first_end(stops: StopStrings, tokens: list[int]) -> int | None:
    return next((i for i in range(len(tokens)) if stops.is_ended_by(tokens[: i + 1])), None)


def test_the_token_that_completes_a_string_ends_the_response(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.encode("12+30=42#\n##7", add_special_tokens=False)
    assert first_end(StopStrings(tokenizer, ["##", "?"]), tokens) == 11
    assert first_end(StopStrings(tokenizer, ["=4", "##"]), tokens) == 6
    assert first_end(StopStrings(tokenizer, ["43"]), tokens) is None
    assert first_end(StopStrings(tokenizer, []), tokens) is None


def test_prompt_text_does_not_complete_a_stop_string(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.encode("#7##", add_special_tokens=False)
    assert first_end(StopStrings(tokenizer, ["##"]), tokens) == 3


def test_special_tokens_have_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    special = tokenizer.all_special_ids[0]
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    stops = StopStrings(tokenizer, ["ab", tokenizer.all_special_tokens[0]])
    assert first_end(stops, [special] * 3 + [a] + [special] * 200 + [b]) == 204


def test_the_tail_finds_the_same_stop_string_as_the_full_text(tokenizer: PreTrainedTokenizerBase) -> None:
    draw = random.Random(0)
    for _ in range(40):
        tokens = [draw.randrange(3, 7) for _ in range(120)]
        strings = [str(tokenizer.decode([draw.randrange(3, 7) for _ in range(length)])) for length in (3, 5)]
        texts = (tokenizer.decode(tokens[: i + 1], skip_special_tokens=True) for i in range(len(tokens)))
        expected = next((i for i, text in enumerate(texts) if any(string in text for string in strings)), None)
        assert first_end(StopStrings(tokenizer, strings), tokens) == expected
