"""Forecast a run in a process with a time limit, for callers that must neither fail nor wait because of it.

plan = plan_in_process(["model=models/tiny", ...], memory=None, seconds=60.0)      # the JSON of `camshaft plan`
out, reason = answer_in_process(SCRIPT, question, seconds=60.0)
"""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from camshaft.errors import CamshaftError
from camshaft.subprocesses import describe_exit, import_path, kill_group, start_python

SCRIPT = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, [resource.getrlimit(resource.RLIMIT_AS)[1]] * 2)
overrides, memory, entries = json.load(sys.stdin)
sys.path.extend(entry for entry in entries if entry not in sys.path)
from camshaft.config import PPOConfig, compose
from camshaft.errors import CamshaftError, ConfigError, report_error
try:
    configs = compose(overrides, PPOConfig)
    if len(configs) != 1:
        raise ConfigError("a sweep has no forecast")
    from camshaft.planning.plan import as_dict, find_change, make_plan
    plan = make_plan(configs[0], memory)
    print(json.dumps(as_dict(plan)), flush=True)
    change = None if plan.fits else find_change(overrides, memory)
    if change is not None:
        print(json.dumps(as_dict(plan) | {"change": list(change[0])}))
except CamshaftError as error:
    sys.exit(report_error(error))
"""
"""Prints the plan, and once more with a change if the run does not fit. A forecast reserves the addresses of the memory
that it counts, so a soft limit of the run is lifted."""
CONFIG_ERROR = 2
"""Exit status of a command whose config is invalid or unsupported."""


class PlanUnavailable(CamshaftError):
    """A run has no forecast. The message is the reason."""


def plan_in_process(overrides: Sequence[str], memory: int | None, seconds: float) -> dict[str, Any]:
    """Return the JSON of `camshaft plan`. Raise PlanUnavailable if there is none within the time limit.

    The search for a change takes longer than the plan, and the plan is returned without it if time runs out.
    """
    out, reason = answer_in_process(SCRIPT, json.dumps([list(overrides), memory, import_path()]).encode(), seconds)
    plans = [line for line in out.splitlines(keepends=True) if line.endswith("}\n")]
    if not plans:
        raise PlanUnavailable(reason)
    return json.loads(plans[-1])


def answer_in_process(script: str, question: bytes, seconds: float) -> tuple[str, str]:
    """Return what a Python process prints that reads the question, and why it may have ended early."""
    try:
        process = start_python(["-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise PlanUnavailable(f"its process could not be started: {error}") from error
    try:
        out, err = process.communicate(question, timeout=seconds)
        reason = _reason(process.returncode, err.decode(errors="replace").strip())
    except subprocess.TimeoutExpired as limit:
        out, reason = limit.output or b"", f"it took more than {seconds:g} s"
    finally:
        kill_group(process.pid)
    return out.decode(errors="replace"), reason


def _reason(status: int, text: str) -> str:
    """Return the message of a process without a plan: that of a config error, or the last line of a traceback."""
    reason = text if status == CONFIG_ERROR else text.rpartition("\n")[2]
    return reason or f"its process ended with {describe_exit(status)}"
