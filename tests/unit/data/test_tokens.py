"""The ids of many prompts are those of one process, and those of an earlier start are used where nothing changed."""

import copy
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from camshaft.data import tokens
from camshaft.data.tokens import tokenise
from camshaft.errors import BatchError
from camshaft.fetch import cache_folder

PLACES = [f"row {i}" for i in range(30)]


def prompts(last: str = "29"):
    texts = [*(str(i) for i in range(29)), last]
    return [[{"role": "user", "content": text}] if i % 2 else f"{text}+1=" for i, text in enumerate(texts)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What holds for many prompts, with few."""
    monkeypatch.setattr(tokens, "_MANY", 10)
    monkeypatch.setattr(tokens, "_CHUNK", 4)
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "cache"))


def as_lists(ids):
    return [row.tolist() for row in ids.rows()]


def expected(found, tokenizer):
    return [
        tokenizer(p).input_ids
        if isinstance(p, str)
        else tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False)
        for p in found
    ]


@pytest.mark.parametrize("workers", [1, 2, None])
def test_ids_do_not_depend_on_the_number_of_processes(tokenizer, workers) -> None:
    assert as_lists(tokenise(prompts(), tokenizer, PLACES, workers)) == expected(prompts(), tokenizer)


def test_a_second_start_tokenises_nothing(tokenizer, monkeypatch, caplog) -> None:
    first = tokenise(prompts(), tokenizer, PLACES, 2)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_made", lambda *_: pytest.fail("tokenised again"))
        caplog.set_level("INFO")
        assert as_lists(tokenise(prompts(), tokenizer, PLACES)) == as_lists(first)
    assert "those of an earlier start" in caplog.text


@pytest.mark.parametrize("change", ["a prompt", "the order", "the template", "a token", "the version", "the day"])
def test_what_the_ids_depend_on_makes_them_anew(tokenizer, monkeypatch, change) -> None:
    other, found = copy.deepcopy(tokenizer), prompts()
    if change == "the day":
        tokenizer.chat_template = other.chat_template = "{{ strftime_now('%d') }}" + tokenizer.chat_template
    tokenise(found, tokenizer, PLACES, 1)
    if change == "a prompt":
        found = prompts("30")
    elif change == "the order":
        found = found[::-1]
    elif change == "the template":
        other.chat_template = "{{ messages[0].content }}"
    elif change == "a token":
        other.add_tokens(["+1="])
    elif change == "the version":
        monkeypatch.setattr(tokens.transformers, "__version__", "0")
    else:
        monkeypatch.setattr(tokens, "date", type("Later", (), {"today": lambda: "2100-01-01"}))
    made = []
    plain = tokens._made
    monkeypatch.setattr(tokens, "_made", lambda *a: (made.append(1), plain(*a))[1])
    assert as_lists(tokenise(found, other, PLACES, 1)) == expected(found, other)
    assert made


@pytest.mark.parametrize("damage", ["cut off", "other rows"])
def test_a_kept_file_that_is_damaged_is_made_again(tokenizer, damage) -> None:
    tokenise(prompts(), tokenizer, PLACES, 1)
    (kept,) = cache_folder("prompts").iterdir()
    if damage == "cut off":
        kept.write_bytes(kept.read_bytes()[:-8])
    else:
        tokens._write(kept, tokenise(prompts()[:3], tokenizer, PLACES[:3]))
    assert as_lists(tokenise(prompts(), tokenizer, PLACES, 1)) == expected(prompts(), tokenizer)


def test_small_sets_are_neither_cut_up_nor_kept(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(tokens, "_MANY", 31)
    monkeypatch.setattr(tokens, "_made", lambda *_: pytest.fail("more than one process"))
    assert as_lists(tokenise(prompts(), tokenizer, PLACES)) == expected(prompts(), tokenizer)
    assert not cache_folder("prompts").exists()


def test_a_cache_that_cannot_be_written_does_not_end_the_run(tokenizer, monkeypatch, tmp_path, caplog) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "file"))
    assert len(tokenise(prompts(), tokenizer, PLACES, 1)) == 30
    assert "the token ids are not kept for the next start" in caplog.text


def test_an_error_of_a_process_is_that_of_the_row(tokenizer) -> None:
    picky = copy.deepcopy(tokenizer)
    picky.chat_template = "{{ raise_exception('no 17') if messages[0].content == '17' else messages[0].content }}"
    with pytest.raises(BatchError, match=r"row 17: the chat template refuses the roles \['user'\]: no 17"):
        tokenise(prompts(), picky, PLACES, 2)


def test_a_process_that_is_killed_is_told(tokenizer, monkeypatch) -> None:
    def killed(start: int, stop: int):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(tokens._Work, "ids", lambda self, start, stop: killed(start, stop))
    with pytest.raises(BatchError, match=r"was ended from outside.*data\.filter_overlong_prompts_workers=1"):
        tokenise(prompts(), tokenizer, PLACES, 2)


def test_a_process_ends_with_its_driver() -> None:
    """The driver is a child of this process: it forks, and is gone; what it forked follows within seconds."""
    read, write = os.pipe()
    driver = os.fork()
    if driver == 0:
        above = os.getpid()
        if os.fork() == 0:
            threading.Thread(target=tokens._end_with, args=(above,), daemon=True).start()
            time.sleep(60)
        os._exit(0)
    os.close(write)
    os.waitpid(driver, 0)
    began = time.monotonic()
    assert os.read(read, 1) == b""  # nobody holds the other end any more
    os.close(read)
    assert time.monotonic() - began < 30


def test_no_process_is_left_behind(tokenizer) -> None:
    before = children()
    tokenise(prompts(), tokenizer, PLACES, 2)
    assert children() <= before


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
