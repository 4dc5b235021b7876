"""The path of a PPO step from the command line to the model stays short."""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.step_path import StepPath, measure

ROOT = Path(__file__).parents[2]
MAX_FRAMES = 12
MAX_LINES = 4485
"""Lines of the functions that a step enters."""
MAX_FILES = 15
"""Files to read for a step."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tools" / "step_path.py"), "--json"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280)
    return json.loads(run.stdout)


def test_the_path_to_the_model_keeps_its_budget(step: dict[str, Any]) -> None:
    stack = step["stack"]
    assert stack[0] == "cli/__init__.py:main"
    assert stack[-1].startswith("engine/")
    assert len(stack) <= MAX_FRAMES, "\n".join(stack)


def test_the_functions_of_a_step_keep_their_budget(step: dict[str, Any]) -> None:
    assert sum(step["lines"].values()) <= MAX_LINES, step["lines"]


def test_a_step_without_environments_enters_nothing_of_them(step: dict[str, Any]) -> None:
    assert not [
        name for name in step["lines"] if name.startswith("agents/") or name in ("rollout/stream.py", "http.py")
    ]


def test_the_architecture_page_lists_files_that_a_step_enters(step: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = files_to_read(page)
    entered = step["lines"].keys() | {frame.partition(":")[0] for frame in step["stack"]}
    assert 0 < len(files) <= MAX_FILES
    assert set(files) <= entered, set(files) - entered
    assert files_to_read(page.replace(files[0], "config/load.py"))[0] not in entered


def files_to_read(page: str) -> list[str]:
    """Return the files of the section about the files of a step."""
    section = page.partition("\n## Files of a step\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("function", [measure, StepPath.lines, StepPath.recording.__wrapped__])
def test_lines_are_those_of_the_source(function: Callable[..., Any]) -> None:
    path = StepPath()
    path.functions.add(function.__code__)
    assert path.lines().total() == len(inspect.getsourcelines(function)[0])
