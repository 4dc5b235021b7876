"""The scripts of examples/data on a few rows in the formats that the authors publish."""

import gzip
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from camshaft.data import PromptOptions, load_prompts
from camshaft.data.tables import read_columns, read_rows, write_parquet
from camshaft.models.tiny import make_tiny_tokenizer
from camshaft.rewards import gsm8k, math_answer

SCRIPTS = Path(__file__).parents[3] / "examples" / "data"
ROW = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., int]:
    """Run a script on `raw` in the test's folder, and write to `out` in that folder."""

    def prepare(script: str, *more: str) -> int:
        main = runpy.run_path(str(SCRIPTS / script))["main"]
        return main(["--local_dir", str(tmp_path / "raw"), "--out", str(tmp_path / "out"), *more])

    return prepare


def as_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as out:
        out.write(text)


def rows_of(path: Path, columns: list[str] = ROW) -> list[dict[str, Any]]:
    return read_rows(path, columns).rows


def check_readable(path: Path, tmp_path: Path) -> None:
    """Load the files with the loader of a run."""
    data = load_prompts(path, make_tiny_tokenizer(tmp_path / "tokenizer"), PromptOptions(max_prompt_length=1000))
    assert len(data.batch) == len(rows_of(path))


GSM8K = [
    {"question": "6 bags of 200?", "answer": "6*200=<<6*200=1200>>1200\n#### 1,200"},
    {"question": "2 - 5?", "answer": "#### -3"},
]


@pytest.mark.parametrize("layout", ["hub", "authors"])
def test_gsm8k(layout: str, prepare: Callable[..., int], tmp_path: Path) -> None:
    if layout == "hub":
        write_parquet(tmp_path / "raw/main/train-00000-of-00001.parquet", GSM8K)
        write_parquet(tmp_path / "raw/main/test-00000-of-00001.parquet", GSM8K[:1])
        write_parquet(tmp_path / "raw/socratic/train-00000-of-00001.parquet", GSM8K)
    else:
        as_lines(tmp_path / "raw/train.jsonl", GSM8K)
        as_lines(tmp_path / "raw/test.jsonl", GSM8K[:1])
        as_lines(tmp_path / "raw/train_socratic.jsonl", GSM8K)
    assert prepare("gsm8k.py") == 0
    rows = rows_of(tmp_path / "out/train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["1200", "-3"]
    assert rows[0]["data_source"] == "openai/gsm8k"
    (message,) = rows[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("6 bags of 200? Let's think step by step")
    assert "####" in message["content"]
    assert (len(rows), len(rows_of(tmp_path / "out/test.parquet"))) == (2, 1)
    for raw, row in zip(GSM8K, rows, strict=True):
        assert gsm8k.compute_score("", raw["answer"], row["reward_model"]["ground_truth"])["score"] == 1
    check_readable(tmp_path / "out/train.parquet", tmp_path)


MATH = [
    {
        "problem": "Half of it?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": r"no \boxed{3}, $\boxed{\frac{1}{2}}$.",
    },
    {"problem": "The set?", "level": "Level 5", "type": "Algebra", "solution": r"so \boxed{\{1, \sqrt{2}\}} and so"},
]


def test_math_as_parquet(prepare: Callable[..., int], tmp_path: Path) -> None:
    write_parquet(tmp_path / "raw/data/train-00000-of-00001.parquet", MATH)
    assert prepare("math_dataset.py") == 0
    rows = rows_of(tmp_path / "out/train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == [r"\frac{1}{2}", r"\{1, \sqrt{2}\}"]
    assert rows[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert rows[1]["extra_info"]["level"] == "Level 5"
    assert "\\boxed{}" in rows[0]["prompt"][0]["content"]
    assert not (tmp_path / "out/test.parquet").exists()
    for raw, row in zip(MATH, rows, strict=True):
        assert math_answer.compute_score("", raw["solution"], row["reward_model"]["ground_truth"])["score"] == 1


def test_math_500_has_only_a_test_split(prepare: Callable[..., int], tmp_path: Path) -> None:
    raw = {"problem": "1+1?", "solution": r"$\boxed 2$", "answer": "2", "subject": "Algebra", "level": 2}
    as_lines(tmp_path / "raw/test.jsonl", [raw])
    assert prepare("math_dataset.py", "--data_source", "HuggingFaceH4/MATH-500") == 0
    (row,) = rows_of(tmp_path / "out/test.parquet")
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("HuggingFaceH4/MATH-500", "2")
    assert row["extra_info"]["subject"] == "Algebra"
    assert not (tmp_path / "out/train.parquet").exists()


BALANCED = st.recursive(
    st.text("a1\\ ", max_size=3), lambda inner: inner.map(lambda text: f"{{{text}}}1"), max_leaves=4
)


@given(BALANCED, st.text("ab$ .", max_size=5))
def test_the_last_box_is_extracted_with_nested_braces(inside: str, after: str) -> None:
    last_boxed = runpy.run_path(str(SCRIPTS / "math_dataset.py"))["last_boxed"]
    assert last_boxed(f"\\boxed{{0}} so \\boxed{{{inside}}}{after}") == (inside.strip() or None)


HELLO = "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: How much is 2+2?\n\nAssistant:"
PROMPT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "How much is 2+2?"},
]


@pytest.mark.parametrize("layout", ["dialogues", "prompts"])
def test_hh(layout: str, prepare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if layout == "dialogues":
        rows = [{"chosen": f"{HELLO} It is 4.", "rejected": f"{HELLO} Five."}]
        as_lines(tmp_path / "raw/helpful-base/train.jsonl.gz", rows)
        others = [{"chosen": f"{HELLO} 4", "rejected": "\n\nHuman: Bye\n\nAssistant: Bye."}]
        as_lines(tmp_path / "raw/harmless-base/train.jsonl.gz", others)
    else:
        rows = [{"prompt": HELLO, "response": "It is 4.", "chosen": "It is 4.", "rejected": "Five."}]
        empty = {"prompt": HELLO, "response": "", "chosen": "", "rejected": "Five."}
        write_parquet(tmp_path / "raw/data/train-00000-of-00001-a1b2c3.parquet", rows)  # not the name of a split
        write_parquet(tmp_path / "raw/data/train-00000-of-00001.parquet", [*rows, empty])
    assert prepare("hh.py") == 0
    (pair,) = rows_of(tmp_path / "out/train_pairs.parquet", ["prompt", "chosen", "rejected"])
    assert pair == {
        "prompt": PROMPT,
        "chosen": [{"role": "assistant", "content": "It is 4."}],
        "rejected": [{"role": "assistant", "content": "Five."}],
    }
    assert read_columns(tmp_path / "out/train_pairs.parquet") == {"prompt", "chosen", "rejected"}
    (row,) = rows_of(tmp_path / "out/train.parquet")
    assert (row["prompt"], row["data_source"], row["reward_model"]["style"]) == (PROMPT, "Anthropic/hh-rlhf", "model")
    assert "train: 1 of 2 rows left out" in capsys.readouterr().out
    check_readable(tmp_path / "out/train.parquet", tmp_path)


def test_consecutive_turns_of_one_role_are_merged() -> None:
    messages = runpy.run_path(str(SCRIPTS / "hh.py"))["messages"]
    turns = messages("\n\nHuman: One\n\nHuman: Two\n\nAssistant: A\n\nHuman said so: yes")
    assert turns == [
        {"role": "user", "content": "One\n\nTwo"},
        {"role": "assistant", "content": "A\n\nHuman said so: yes"},
    ]


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "files", "message"),
    [
        ("gsm8k.py", {}, "does not exist; use the folder"),
        ("gsm8k.py", {"notes.txt": "hello"}, "contains no files of a split, such as train.jsonl"),
        (
            "gsm8k.py",
            {"train.jsonl": '{"question": "a"}\n'},
            "train.jsonl has no column 'answer'. Its columns: question",
        ),
        ("gsm8k.py", {"train.jsonl": '{"question": "a", "ans'}, "train.jsonl, line 1: invalid JSON"),
        (
            "gsm8k.py",
            {"train.jsonl": '{"question": "a", "answer": "5"}'},
            "train, row 0: the answer has no '####': ...'5'",
        ),
        (
            "math_dataset.py",
            {"test.jsonl": '{"problem": "a", "solution": "5"}'},
            "test, row 0: the solution has no \\boxed",
        ),
        ("hh.py", {"test.jsonl": '{"chosen": "a", "rejected": "b"}'}, "test: none of 1 rows is a pair of dialogues"),
    ],
)
def test_invalid_raw_files_are_errors(
    script: str, files: dict[str, str], message: str, prepare: Callable[..., int], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, text in files.items():
        (tmp_path / "raw").mkdir(exist_ok=True)
        (tmp_path / "raw" / name).write_text(text)
    assert prepare(script) == 1
    assert message in capsys.readouterr().err


def test_a_missing_raw_column_is_reported_with_the_nearest(
    prepare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(tmp_path / "raw/train.parquet", [{"questions": "a", "answer": "#### 1"}])
    assert prepare("gsm8k.py") == 1
    assert "has no column 'question'. Did you mean 'questions'?" in capsys.readouterr().err
