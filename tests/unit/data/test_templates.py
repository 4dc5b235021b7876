"""A chat template that never ends or fills the memory is one sentence, before any data is formatted."""

import time
from pathlib import Path
from typing import Any

import pytest

from camshaft.data import PromptOptions, load_prompts
from camshaft.data.chat import render
from camshaft.data.preferences import PreferenceOptions, load_preferences
from camshaft.data.sft import SFTOptions, load_sft
from camshaft.data.tables import write_parquet
from camshaft.data.templates import try_template
from camshaft.errors import BatchError
from camshaft.models.loader import load_tokenizer
from camshaft.models.tiny import make_tiny_tokenizer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='12345678') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
)
MESSAGES = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def tokenizer_with(template: str, folder: Path) -> Any:
    make_tiny_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(folder))


def try_on_messages(template: str, folder: Path, seconds: float = 60) -> None:
    tokenizer = tokenizer_with(template, folder)
    try_template(tokenizer, lambda: render(MESSAGES, tokenizer, "row 0", True), seconds)


def test_an_endless_template_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=rf"{tmp_path}/chat_template\.jinja takes more than 0\.5 s"):
        try_on_messages(ENDLESS, tmp_path, seconds=0.5)


@pytest.mark.parametrize("template", ["{{ 'x' * 10000000000 }}", DOUBLING])
def test_a_template_that_fills_the_memory_is_stopped(template: str, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=rf"{tmp_path}/chat_template\.jinja takes more than 1 GiB of memory"):
        try_on_messages(template, tmp_path)


def test_other_errors_of_a_template_are_left_to_the_row(tmp_path: Path) -> None:
    try_on_messages("{{ raise_exception('no') }}", tmp_path / "raising")
    try_on_messages("{{ 1 / 0 }}", tmp_path / "failing")


def test_a_template_is_tried_once(tmp_path: Path) -> None:
    tokenizer, calls = tokenizer_with("tried once", tmp_path), tmp_path / "calls"
    calls.mkdir()
    for number in range(3):
        try_template(tokenizer, (calls / str(number)).mkdir)
    assert [path.name for path in calls.iterdir()] == ["0"]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["prompts", "sft", "preferences"])
def test_a_run_stops_before_an_endless_template(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(ENDLESS, tmp_path / "tokenizer")
    row = {"prompt": MESSAGES[:1], "messages": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES[:1] + MESSAGES}
    file = write_parquet(tmp_path / "rows.parquet", [row] * 3)
    load = {
        "prompts": lambda: load_prompts(file, tokenizer, PromptOptions(max_prompt_length=16)),
        "sft": lambda: load_sft(file, tokenizer, SFTOptions()),
        "preferences": lambda: load_preferences(file, tokenizer, PreferenceOptions(prompt_key=None)),
    }[kind]
    begin = time.monotonic()
    with pytest.raises(BatchError, match="takes more than 10 s"):
        load()
    assert time.monotonic() - begin < 60
