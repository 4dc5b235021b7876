"""docs/spec.md is what its rows say, each row has a test that exists, and the script finds what is wrong with them."""

from pathlib import Path
from typing import Any

import pytest

from camshaft.config.tree import get
from spec import table
from spec.rows import ALIASES, Pending
from spec.test_told import run_with

VALUES: dict[str, tuple[Any, Any]] = {
    "external_libs": ("json", None),
    "warmup_style": ("cosine", "constant"),
    "min_num_params": (7, 0),
    "gemma": (0.5, 1.0),
}


def test_the_page_is_whole_and_what_these_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("key", ALIASES)
def test_an_older_name_means_the_newer_one(key: str, tmp_path: Path) -> None:
    typed, default = VALUES[key.rpartition(".")[2]]
    found = [get(run_with(tmp_path, words).model_dump(), table.newer(key)) for words in ({}, {key: typed})]
    assert found == [default, typed]


# -- the script can fail --------------------------------------------------------------------------

NOT_THERE = {
    "tests/spec/nowhere.py::test_x",
    "tests/spec/test_table.py::test_x",
    "tests/spec/test_table.py::test_an_older_name_means_the_newer_one[no.key]",
}
"""No such file, no such test, no such case."""
FOUND: dict[str, tuple[str, Any, str]] = {
    "a key without a test": ("noticed_by", lambda key: (), "critic.optim.lr: no test"),
    "a method without a test": ("METHODS", {"Engine": {"to(self)": ("Moves.", ())}}, "Engine, to(self): no test"),
    "an old page": ("HEAD", "another", "docs/spec.md is not what these rows say"),
    "a key that is gone": ("DEVIATES", {"data.gone": "."}, "data.gone: there is no such key any more"),
    "something that is there by now": (
        "PENDING", (Pending("algorithm.kl_penalty", "abs", "abs"),), "algorithm.kl_penalty=abs: is taken now",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_the_script_finds(case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name, value, said = FOUND[case]
    monkeypatch.setattr(table, "named", set)  # no test is looked for
    monkeypatch.setattr(table, name, value)
    assert table.main(["--check"]) == 1
    assert said in capsys.readouterr().out


def test_the_script_finds_tests_that_do_not_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = "tests/spec/test_table.py::test_an_older_name_means_the_newer_one[algorithm.gemma]"
    monkeypatch.setattr(table, "named", lambda: NOT_THERE | {there})
    assert table.main(["--check"]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if "there is no such test" in line]
    assert found == [f"{test}: there is no such test" for test in sorted(NOT_THERE)]


def test_strict_counts_what_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "problems", lambda: iter(()))
    assert table.main(["--strict"]) == (1 if table.PENDING else 0)
    assert capsys.readouterr().out.count("not yet (") == len(table.PENDING)
