"""A run whose reader has gone, as in `camshaft ppo ... | head -1`, continues and writes to a file."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import ppo_args

from camshaft import storage
from camshaft.tracking.jsonl import read_metrics

pytestmark = pytest.mark.timeout(200)

RUN: dict[str, Any] = {
    "trainer.total_training_steps": 2,
    "trainer.total_epochs": 2,
    "trainer.save_freq": 2,
    "trainer.logger": "[console,jsonl]",
}


@pytest.mark.parametrize(
    "stderr",
    [
        pytest.param(subprocess.PIPE, id="stdout"),
        pytest.param(subprocess.STDOUT, id="both", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_when_its_output_is_closed(stderr: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "camshaft", "ppo", *ppo_args(tmp_path, RUN)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read() if process.stderr is not None else ""
        assert process.wait(100) == 0
    log, run = tmp_path / "run" / "logs" / "driver.log", tmp_path / "run"
    warning = f"camshaft: standard output was closed; the run continues, and writes to {log}"
    text = log.read_text()
    assert text.splitlines()[0] == warning
    assert "saved " in text
    if stderr == subprocess.PIPE:
        assert err.count("was closed") == 1
        assert warning in err
        assert "Traceback" not in err
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2]
    assert [step for step, _ in storage.step_folders(run)] == [2]
