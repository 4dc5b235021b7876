"""Decoded texts are those of transformers, for tokenizers with and without text changes of their own."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from camshaft.models.tiny import make_tiny_tokenizer
from camshaft.trainer.build import decode_rows


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


def word_pieces(kind: type[PreTrainedTokenizerFast], **options: Any) -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[UNK]", "it", "##s", "n", "'", "t", ".", "do"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return kind(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", **options)


@pytest.mark.parametrize("name", ["bytes", "cleaned", "plain", "changed by a subclass"])
def test_texts_are_those_of_batch_decode(name: str, tmp_path: Path) -> None:
    tokenizer = {
        "bytes": lambda: make_tiny_tokenizer(tmp_path),
        "cleaned": lambda: word_pieces(PreTrainedTokenizerFast, clean_up_tokenization_spaces=True),
        "plain": lambda: word_pieces(PreTrainedTokenizerFast, clean_up_tokenization_spaces=False),
        "changed by a subclass": lambda: word_pieces(Shouting, clean_up_tokenization_spaces=False),
    }[name]()
    draw = random.Random(0)
    ids = [[draw.randrange(len(tokenizer)) for _ in range(length)] for length in (0, 1, 5, 40)]
    expected = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    assert decode_rows(tokenizer, ids) == expected
    assert decode_rows(tokenizer, []) == []
    assert any(expected)
