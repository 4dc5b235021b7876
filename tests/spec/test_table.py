"""docs/spec.md matches its rows, every row has a test that exists, and the script reports errors."""

from pathlib import Path
from typing import Any

import pytest

from camshaft.config.schema.aliases import ALIASES
from camshaft.config.tree import get
from spec import table
from spec.rows import KEYS, Unimplemented
from spec.test_fields import run_with

VALUES: dict[str, tuple[Any, Any]] = {
    "external_libs": ("json", None),
    "warmup_style": ("cosine", "constant"),
    "min_num_params": (7, 0),
    "gemma": (0.5, 1.0),
}
"""Last name of an alias to a value and the default."""


def test_page_matches_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("key", [key for key in KEYS if key in ALIASES])
def test_alias_sets_its_key(key: str, tmp_path: Path) -> None:
    value, default = VALUES[key.rpartition(".")[2]]
    results = [get(run_with(tmp_path, keys).model_dump(), ALIASES[key]) for keys in ({}, {key: value})]
    assert results == [default, value]


# -- errors that the script reports ---------------------------------------------------------------

ERRORS: dict[str, tuple[str, Any, str]] = {
    "a key without a test": ("tests_of_key", lambda key: (), "critic.optim.lr: no test"),
    "a method without a test": ("METHODS", {"Engine": {"to(self)": ("Moves.", ())}}, "Engine, to(self): no test"),
    "an outdated page": ("HEAD", "another", "docs/spec.md is outdated"),
    "an unknown key": ("DEVIATES", {"data.gone": "."}, "data.gone: unknown key"),
    "an implemented value": (
        "UNIMPLEMENTED", (Unimplemented("algorithm.kl_penalty", "abs", "abs"),),
        "algorithm.kl_penalty=abs: is accepted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_script_reports(case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name, value, message = ERRORS[case]
    monkeypatch.setattr(table, name, value)
    assert table.main(["--check"]) == 1
    assert message in capsys.readouterr().out


def test_script_reports_missing_tests(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    missing = {
        "tests/spec/nowhere.py::test_x",
        "tests/spec/test_table.py::test_x",
        "tests/spec/test_table.py::test_page_matches_the_rows[case]",
    }
    existing = "tests/spec/test_table.py::test_alias_sets_its_key[algorithm.gemma]"
    monkeypatch.setattr(table, "named_tests", lambda: missing | {existing})
    assert table.main(["--check"]) == 1
    reported = [line for line in capsys.readouterr().out.splitlines() if "no such test" in line]
    assert reported == [f"{test}: no such test" for test in sorted(missing)]


def test_strict_reports_unimplemented_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "problems", lambda: iter(()))
    assert table.main(["--strict"]) == (1 if table.UNIMPLEMENTED else 0)
    assert capsys.readouterr().out.count("not implemented (") == len(table.UNIMPLEMENTED)
