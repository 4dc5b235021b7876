"""Run `camshaft plan` in a process with a time limit, for callers that must neither fail nor wait because of it.

plan = plan_in_process(["model=models/tiny", ...], memory=None, seconds=60.0)      # the JSON of the command
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from camshaft.errors import CamshaftError
from camshaft.subprocesses import import_path, kill_group, start_python

SCRIPT = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, [resource.getrlimit(resource.RLIMIT_AS)[1]] * 2)
arguments, entries = json.load(sys.stdin)
sys.path.extend(entry for entry in entries if entry not in sys.path)
from camshaft.cli import main
sys.exit(main(["plan", "--json", *arguments]))
"""
"""A forecast reserves the addresses of the memory that it counts, so a soft limit of the run is lifted."""


class PlanUnavailable(CamshaftError):
    """A run has no forecast. The message is the reason."""


def plan_in_process(overrides: Sequence[str], memory: int | None, seconds: float) -> dict[str, Any]:
    """Return the JSON of `camshaft plan`. Raise PlanUnavailable if there is none within the time limit."""
    arguments = [*([] if memory is None else ["--memory", str(memory)]), *overrides]
    try:
        process = start_python(["-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise PlanUnavailable(f"its process could not be started: {error}") from error
    try:
        out, err = process.communicate(json.dumps([arguments, import_path()]).encode(), timeout=seconds)
        return json.loads(out)
    except subprocess.TimeoutExpired as error:
        raise PlanUnavailable(f"it took more than {seconds:g} s") from error
    except ValueError as error:
        lines = err.decode(errors="replace").strip().splitlines()
        raise PlanUnavailable(lines[-1] if lines else f"its process ended with {process.returncode}") from error
    finally:
        kill_group(process.pid)
