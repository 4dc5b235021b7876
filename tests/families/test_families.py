"""The most used model types equal transformers, and types are refused for the stated reasons.

`make test-families` checks all types, with all heads.
"""

from pathlib import Path

import pytest

from camshaft.config.engine import Head

from .checks import check_head, refusal, write_model
from .configs import decoder_types
from .refused import REFUSED

MOST_USED = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2", "phi3", "opt"),
    *("qwen3_moe", "mixtral", "deepseek_v3", "gemma4_text"),
)


@pytest.mark.parametrize("head", ["causal_lm", "value"])
@pytest.mark.parametrize("model_type", MOST_USED)
def test_training_equals_transformers(model_type: str, head: Head, tmp_path: Path) -> None:
    write_model(model_type, tmp_path)
    outcome = check_head(tmp_path, head)
    assert outcome.status == "equal", outcome.detail


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_types_are_refused_for_the_stated_reason(model_type: str, tmp_path: Path) -> None:
    assert REFUSED[model_type] in (refusal(model_type, tmp_path) or "accepted")


def test_refused_types_are_decoder_only_types() -> None:
    assert REFUSED.keys() <= set(decoder_types())
