"""A tokenizer of single characters; its template is `<|im_start|>` + u/a/s + text + `<|im_end|>`."""

import pytest
from transformers import PreTrainedTokenizerFast

from camshaft.models.tiny import make_tiny_tokenizer


@pytest.fixture
def tokenizer(tmp_path) -> PreTrainedTokenizerFast:
    return make_tiny_tokenizer(tmp_path / "tokenizer")
