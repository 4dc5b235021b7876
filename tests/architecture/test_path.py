"""The path of a PPO step from the command line to the model stays short."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FRAMES = 12


@pytest.mark.timeout(300)
def test_the_path_to_the_model_keeps_its_budget() -> None:
    command = [sys.executable, str(ROOT / "tools" / "step_path.py"), "--json"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280)
    stack = json.loads(run.stdout)["stack"]
    assert stack[0] == "cli/__init__.py:main"
    assert stack[-1].startswith("engine/")
    assert len(stack) <= MAX_FRAMES, "\n".join(stack)
