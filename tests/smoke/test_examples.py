"""The scripts in examples/ run as documented."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from camshaft import storage
from camshaft.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[2]


def test_a_grpo_loop_of_less_than_80_lines_learns(tmp_path: Path) -> None:
    script = ROOT / "examples" / "grpo_loop.py"
    assert len(script.read_text().splitlines()) < 80
    command = [sys.executable, str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert process.returncode == 0, process.stderr
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", process.stdout)]
    assert len(rewards) == 40
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.95


def test_the_asynchronous_example_runs_on_a_cpu(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = ["sh", str(ROOT / "examples" / "async" / "cpu.sh"), "steps=4", "batch=4"]
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert process.returncode == 0, process.stderr
    lines = read_metrics(tmp_path / "runs" / "async" / "metrics.jsonl")
    assert [line["async/staleness_max"] for line in lines] == [0, 1, 1, 1]
    assert re.search(r"the trainer waited \d+% of the time, the generator \d+%; ", process.stdout + process.stderr)


@pytest.mark.slow
def test_an_engine_without_roles_trains_on_two_ranks(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(ROOT / "examples" / "engine" / "train.py")
    process = subprocess.run([*launch, script, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", process.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 5
    assert storage.verify(tmp_path / "global_step_60")["global_step"] == 60
