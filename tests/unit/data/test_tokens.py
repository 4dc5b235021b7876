"""Parallel tokenization equals that of one process, and cached token ids are reused if nothing changed."""

import copy
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

import pytest
from safetensors import SafetensorError

from camshaft.data import tokens
from camshaft.data.tokens import tokenize
from camshaft.errors import BatchError
from camshaft.fetch import cache_folder

PLACES = [f"row {i}" for i in range(30)]


def prompts(last: str = "29"):
    texts = [*(str(i) for i in range(29)), last]
    return [[{"role": "user", "content": text}] if i % 2 else f"{text}+1=" for i, text in enumerate(texts)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lower the limits so that few prompts behave like many."""
    monkeypatch.setattr(tokens, "_MIN_PARALLEL_ROWS", 10)
    monkeypatch.setattr(tokens, "_CHUNK", 4)
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "cache"))


def as_lists(ids):
    return [row.tolist() for row in ids.rows()]


def expected(data, tokenizer):
    return [
        tokenizer(p).input_ids
        if isinstance(p, str)
        else tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False)
        for p in data
    ]


@pytest.mark.parametrize("workers", [1, 2, None])
def test_ids_do_not_depend_on_the_number_of_processes(tokenizer, workers) -> None:
    assert as_lists(tokenize(prompts(), tokenizer, PLACES, workers)) == expected(prompts(), tokenizer)


def test_a_second_start_reads_the_cache(tokenizer, monkeypatch, caplog) -> None:
    first = tokenize(prompts(), tokenizer, PLACES, 2)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_tokenize", lambda *_: pytest.fail("tokenised again"))
        caplog.set_level("INFO")
        assert as_lists(tokenize(prompts(), tokenizer, PLACES)) == as_lists(first)
    assert "read cached token ids" in caplog.text


@pytest.mark.parametrize(
    "change", ["a prompt", "the order", "the template", "an argument", "a token", "the version", "the day"]
)
def test_changed_inputs_invalidate_the_cache(tokenizer, monkeypatch, change) -> None:
    other, data, arguments = copy.deepcopy(tokenizer), prompts(), None
    if change == "the day":
        tokenizer.chat_template = other.chat_template = "{{ strftime_now('%d') }}" + tokenizer.chat_template
    tokenize(data, tokenizer, PLACES, 1)
    if change == "a prompt":
        data = prompts("30")
    elif change == "the order":
        data = data[::-1]
    elif change == "the template":
        other.chat_template = "{{ messages[0].content }}"
    elif change == "an argument":
        arguments = [{"tools": [{"name": "add"}]}] * 30
    elif change == "a token":
        other.add_tokens(["+1="])
    elif change == "the version":
        monkeypatch.setattr(tokens.transformers, "__version__", "0")
    else:
        monkeypatch.setattr(tokens, "date", type("Later", (), {"today": lambda: "2100-01-01"}))
    created = []
    original = tokens._tokenize
    monkeypatch.setattr(tokens, "_tokenize", lambda *a: (created.append(1), original(*a))[1])
    assert as_lists(tokenize(data, other, PLACES, 1, arguments)) == expected(data, other)
    assert created


@pytest.mark.parametrize("damage", ["cut off", "other rows"])
def test_a_damaged_cache_file_is_replaced(tokenizer, damage) -> None:
    tokenize(prompts(), tokenizer, PLACES, 1)
    (kept,) = cache_folder("prompts").iterdir()
    if damage == "cut off":
        kept.write_bytes(kept.read_bytes()[:-8])
    else:
        tokens._write(kept, tokenize(prompts()[:3], tokenizer, PLACES[:3]))
    assert as_lists(tokenize(prompts(), tokenizer, PLACES, 1)) == expected(prompts(), tokenizer)


def test_small_sets_are_neither_parallel_nor_cached(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(tokens, "_MIN_PARALLEL_ROWS", 31)
    monkeypatch.setattr(tokens, "_tokenize", lambda *_: pytest.fail("more than one process"))
    assert as_lists(tokenize(prompts(), tokenizer, PLACES)) == expected(prompts(), tokenizer)
    assert not cache_folder("prompts").exists()


def test_an_unwritable_cache_is_only_a_warning(tokenizer, monkeypatch, tmp_path, caplog) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "file"))
    assert len(tokenize(prompts(), tokenizer, PLACES, 1)) == 30
    assert "could not cache the token ids" in caplog.text


def test_a_full_disk_is_only_a_warning(tokenizer, monkeypatch, caplog) -> None:
    def write_a_part(tensors: object, path: Path) -> NoReturn:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(tokens, "save_file", write_a_part)
    assert len(tokenize(prompts(), tokenizer, PLACES, 1)) == 30
    assert "could not cache the token ids" in caplog.text
    assert list(cache_folder("prompts").iterdir()) == []


def test_errors_in_a_process_name_the_row(tokenizer) -> None:
    picky = copy.deepcopy(tokenizer)
    picky.chat_template = "{{ raise_exception('no 17') if messages[0].content == '17' else messages[0].content }}"
    with pytest.raises(
        BatchError, match=r"row 17: the chat template rejects messages with the roles \['user'\]: no 17"
    ):
        tokenize(prompts(), picky, PLACES, 2)


def test_a_killed_process_is_an_error(tokenizer, monkeypatch) -> None:
    def killed(start: int, stop: int):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(tokens._Job, "tokenize", lambda self, start, stop: killed(start, stop))
    with pytest.raises(BatchError, match=r"was killed.*data\.filter_overlong_prompts_workers=1"):
        tokenize(prompts(), tokenizer, PLACES, 2)


def test_processes_exit_with_the_driver(tokenizer) -> None:
    """A process of the pool, whose driver exits at once, closes its pipe within seconds."""
    read, write = os.pipe()
    driver = os.fork()
    if driver == 0:
        try:
            driver_pid = os.getpid()
            if os.fork() == 0:
                tokens._initialize_process(tokens._Job([], tokenizer, [], []), driver_pid)
                time.sleep(60)
        finally:  # a forked test process never returns to pytest
            os._exit(0)
    os.close(write)
    os.waitpid(driver, 0)
    start = time.monotonic()
    assert os.read(read, 1) == b""  # end of file: no process holds the other end
    os.close(read)
    assert time.monotonic() - start < 60


def test_no_process_remains(tokenizer) -> None:
    before = children()
    tokenize(prompts(), tokenizer, PLACES, 2)
    assert children() <= before


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
