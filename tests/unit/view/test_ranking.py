"""Responses of all steps are ranked, and only new files are read."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.run_folders import make_run, sample_rows, write_samples

from camshaft.tracking.run_folder import RunFolder, RunFolderError
from camshaft.view import ranking
from camshaft.view.ranking import Ranking, first_indices

STEPS = range(1, 13)


@pytest.fixture
def responses() -> dict[int, list[dict[str, Any]]]:
    """Return steps of responses with few different scores, so that many of them are equal."""
    draw = random.Random(0)
    steps = {step: sample_rows(groups=5, size=4) for step in STEPS}
    for rows in steps.values():
        for row in rows:
            row |= {"score": draw.choice([0.0, 0.25, 1.0]), "gap": draw.random(), "response_tokens": draw.randrange(99)}
    return steps


@pytest.fixture
def run(responses: dict[int, list[dict[str, Any]]], tmp_path: Path) -> RunFolder:
    return RunFolder(make_run(tmp_path / "run", responses=responses))


@pytest.mark.parametrize(
    ("order", "key"),
    [
        ("worst", lambda row: row["score"]),
        ("best", lambda row: -row["score"]),
        ("gap", lambda row: -np.float32(row["gap"])),
        ("long", lambda row: -row["response_tokens"]),
    ],
)
@pytest.mark.parametrize("count", [1, 50, 1000])
def test_the_order_is_that_of_sorted(
    order: str, key: Any, count: int, run: RunFolder, responses: dict[int, list[dict[str, Any]]]
) -> None:
    rows = [(step, row) for step, rows in responses.items() for row in rows]
    rows.reverse()  # `sorted` is stable: of equal responses, the newest come first
    expected = [(step, row["row"]) for step, row in sorted(rows, key=lambda pair: key(pair[1]))][:count]
    shown = Ranking(run).rows(order, count)
    assert [(row["step"], row["row"]) for row in shown] == expected
    assert "token_ends" not in shown[0]
    assert "advantages" not in shown[0]
    assert all(row["response"] == responses[row["step"]][row["row"]]["response"] for row in shown)


def test_only_new_and_changed_files_are_read(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def record(path: Path, *args: Any, **options: Any) -> Any:
        read.append(path.name)
        return read_samples(path, *args, **options)

    read_samples = ranking.read_samples
    monkeypatch.setattr(ranking, "read_samples", record)
    index = Ranking(run)
    first = index.rows("worst")
    assert {f"step_{step}.parquet" for step in STEPS} == set(read)
    read.clear()
    assert index.rows("worst") == first
    assert read == []
    worse = [row | {"score": -1.0} for row in sample_rows(groups=1, size=2)]
    write_samples(run.path, 13, worse)
    assert [row["step"] for row in index.rows("worst", 2)] == [13, 13]
    assert set(read) == {"step_13.parquet"}
    write_samples(run.path, 13, [row | {"score": 5.0} for row in sample_rows(groups=2, size=2)])
    assert [row["step"] for row in index.rows("best", 4)] == [13] * 4


def test_deleted_and_damaged_files_are_left_out(run: RunFolder) -> None:
    index = Ranking(run)
    index.rows("worst")
    (run.path / "samples" / "step_3.parquet").unlink()
    (run.path / "samples" / "step_4.parquet").write_text("no parquet")
    assert {row["step"] for row in index.rows("worst", 1000)} == set(STEPS) - {3, 4}
    for step in STEPS:
        (run.path / "samples" / f"step_{step}.parquet").unlink(missing_ok=True)
    assert index.rows("worst") == []


def test_files_without_a_column_are_not_ranked_by_it(tmp_path: Path) -> None:
    rows = sample_rows(groups=1, size=2)
    for row in rows:
        del row["gap"]
    index = Ranking(RunFolder(make_run(tmp_path / "run", responses={1: rows})))
    assert index.rows("gap") == []
    assert len(index.rows("long")) == 2


def test_missing_numbers_come_nowhere() -> None:
    values = np.array([np.nan, 3, 1, np.nan, 1, 2], dtype=np.float32)
    assert first_indices(values, 3).tolist() == [4, 2, 5]
    assert first_indices(values, 10).tolist() == [4, 2, 5, 1]
    assert first_indices(values[:1], 10).tolist() == []


def test_a_file_that_vanishes_while_it_is_read_is_no_error(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Ranking(run)
    known = [(row["step"], row["row"]) for row in index.rows("worst", 50)]

    def fail(path: Path, *_: Any, **__: Any) -> Any:
        raise RunFolderError(f"{path} cannot be read")

    monkeypatch.setattr(ranking, "read_samples", fail)
    assert {(row["step"], row["row"]) for row in index.rows("long", 1000)} == set(known)
