import json
from pathlib import Path

import pytest

from camshaft.rewards import output
from camshaft.rewards.manager import RewardFailure, log_failures


def failure(row: int, response: str = "4\ud800") -> RewardFailure:
    return RewardFailure(row, "error", "sums", "ValueError: no", "Traceback ...", 0.25, response)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_describes_the_failure(tmp_path: Path) -> None:
    path = tmp_path / "rewards" / "failed.jsonl"
    log_failures([failure(3)], tmp_path, "step 12")
    log_failures([failure(4)], tmp_path, "validation")  # a run that continues
    assert lines(path)[0] == {
        "when": "step 12", "row": 3, "kind": "error", "function": "", "data_source": "sums",
        "message": "ValueError: no", "trace": "Traceback ...", "seconds": 0.25, "response": "4\ud800",
    }  # fmt: skip
    assert [line["when"] for line in lines(path)] == ["step 12", "validation"]


def test_without_failures_no_file_is_written(tmp_path: Path) -> None:
    log_failures([], tmp_path, "step 1")
    assert not (tmp_path / "rewards").exists()


def test_a_full_disk_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rewards").touch()
    log_failures([failure(3)], tmp_path, "step 12")
    assert "failed samples cannot be written to" in caplog.text


def test_the_log_is_rotated_and_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_BYTES", 1000)
    folder = tmp_path / "rewards"
    for step in range(100):
        log_failures([failure(step, "x" * 100)], tmp_path, f"step {step}")
    assert sorted(file.name for file in folder.iterdir()) == ["failed.1.jsonl", "failed.jsonl"]
    assert all(file.stat().st_size < 1000 + 400 for file in folder.iterdir())
    rows = [line["row"] for name in ("failed.1.jsonl", "failed.jsonl") for line in lines(folder / name)]
    assert rows == list(range(100 - len(rows), 100))
