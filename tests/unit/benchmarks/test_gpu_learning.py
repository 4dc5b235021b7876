"""`benchmarks/gpu_learning.py` without a GPU: its runs are reduced to a row each, and the script runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import gpu_learning

BENCHMARKS = Path(gpu_learning.__file__).parent


def row(mode: str, scores: list[float], rows: list[dict[str, Any]]) -> dict[str, Any]:
    result = {"scores": scores, "apart": 0.1, "seconds": 3.0}
    return gpu_learning.result_row({"algorithm": "grpo", "mode": mode}, result, rows)


def test_a_curve_is_compared_with_that_of_float32() -> None:
    exact = row("float32", [0.2] * 20 + [0.5] * 10 + [0.8] * 20, [])
    assert (exact["first"], exact["middle"], exact["last"]) == pytest.approx((0.2, 0.5, 0.8))
    assert exact["relative"] == 1
    assert row("lora", [0.2] * 30 + [0.5] * 20, [exact])["relative"] == pytest.approx(0.5)


def test_a_run_that_failed_has_no_numbers() -> None:
    failed = gpu_learning.result_row({"algorithm": "gae", "mode": "lora"}, {"failed": "out of memory"}, [])
    assert failed["first"] is None
    assert failed["failed"] == "out of memory"


@pytest.mark.slow
def test_the_script_trains_each_mode_from_the_same_weights(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_learning.py"), "--tiny", "--device", "cpu", "--algorithms", "grpo"]
    process = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    rows: list[Any] = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    assert [each["mode"] for each in rows] == list(gpu_learning.MODES)
    assert all(len(each["scores"]) == 2 for each in rows)
    assert rows[0]["apart"] < 1e-4 < rows[1]["apart"] < 0.1  # rounding of float32, and of bfloat16
