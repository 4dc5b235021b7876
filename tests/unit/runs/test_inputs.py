"""Python objects become files whose names are checksums of their content."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from camshaft.errors import ConfigError
from camshaft.models.tiny import make_tiny_model
from camshaft.runs.inputs import is_path, plain, save_model, save_rows, save_tokenizer

ROWS = [{"prompt": "a", "answer": np.int64(3)}, {"prompt": "\u00e9", "scores": np.array([1.5, 2])}]


class Dataset:
    """Rows as in `datasets.Dataset`: a length, and dicts when it is iterated."""

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Any:
        return iter(ROWS)


def test_equal_rows_have_one_file(tmp_path: Path) -> None:
    first = save_rows(ROWS, tmp_path, "data")
    assert save_rows(Dataset(), tmp_path, "data") == first
    assert save_rows(ROWS[:1], tmp_path, "data") != first
    lines = Path(first).read_text(encoding="utf-8").splitlines()
    assert [*map(json.loads, lines)] == [{"prompt": "a", "answer": 3}, {"prompt": "\u00e9", "scores": [1.5, 2.0]}]
    assert len([*(tmp_path / "inputs").iterdir()]) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((row for row in ROWS), r"data is an iterator without a length.*pass list\(data\)"),
        ({"prompt": ["a"]}, "data has type dict; pass a path, or a sequence of dicts"),
        ([{"prompt": "a"}, "b"], "data, row 1 has type str; each row must be a dict"),
        ([{"prompt": object()}], "data, row 0 cannot be written as JSON: column prompt: object is not a JSON type"),
        (7, "data has type int"),
    ],
)
def test_other_data_is_rejected(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        save_rows(rows, tmp_path, "data")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_model_is_written_once_with_its_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", hidden=16)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    first = save_model(model, tokenizer, tmp_path)
    assert save_model(model, None, tmp_path) == first  # the tokenizer of the folder that it was loaded from
    assert AutoTokenizer.from_pretrained(first)("1+2")["input_ids"] == tokenizer("1+2")["input_ids"]
    model.lm_head.weight.data += 1
    other = save_model(model, tokenizer, tmp_path)
    assert other != first
    assert Path(first, "config.json").is_file()
    assert Path(save_tokenizer(tokenizer, tmp_path), "tokenizer.json").is_file()
    assert len([*(tmp_path / "inputs").iterdir()]) == 3
    model.config._name_or_path = model.name_or_path = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"its tokenizer cannot be loaded .* pass tokenizer="):
        save_model(model, None, tmp_path)
    with pytest.raises(ConfigError, match="model has type dict"):
        save_model({}, tokenizer, tmp_path)


def test_paths_are_recognized() -> None:
    assert all(map(is_path, ["a", Path("a"), ["a", Path("b")]]))
    assert not any(map(is_path, [[], [{}], ROWS, None, 3]))
    assert plain({"a": (Path("b"), {"c": Path("d")}), 3: 1.5}) == {"a": ["b", {"c": "d"}], "3": 1.5}
