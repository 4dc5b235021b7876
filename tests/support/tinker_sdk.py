"""Run programs in the environment of the Tinker SDK, which `make test-tinker` creates.

output = run_python("import tinker; print(tinker.__version__)")
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tinker" / "bin" / "python"


def run_python(
    code: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float = 120,
) -> str:
    """Run a program with the SDK, and return its output. It must succeed."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", **(environment or {})}
    process = subprocess.run(
        [PYTHON, "-c", code, *arguments], capture_output=True, text=True, timeout=seconds, env=variables, cwd=folder
    )
    assert process.returncode == 0, f"{process.stdout[-2000:]}\n{process.stderr[-6000:]}"
    return process.stdout
