"""The findings of `camshaft doctor`.

checks = {"python": check_python, "memory": check_memory}      # each yields findings
findings = collect(checks, seconds=5.0)
report(findings)                                               # text, one finding per line
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from functools import partial
from typing import Literal, NamedTuple

from camshaft.errors import CamshaftError
from camshaft.masking import mask_text, printable
from camshaft.subprocesses import start_thread

Status = Literal["OK", "WARN", "FAIL"]
ORDER: tuple[Status, ...] = ("OK", "WARN", "FAIL")


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    status: Status
    message: str
    fix: str = ""
    """Command that fixes the problem, or an empty string."""


Check = Callable[[], Iterable[Finding]]


def ok(check: str, message: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, "OK", message)


def warn(check: str, message: str, fix: str) -> Finding:
    """Return a problem that a run may survive."""
    return Finding(check, "WARN", message, fix)


def fail(check: str, message: str, fix: str) -> Finding:
    """Return a problem that makes a run fail."""
    return Finding(check, "FAIL", message, fix)


def collect(checks: Mapping[str, Check], seconds: float, fix: str = "") -> list[Finding]:
    """Run all checks side by side and return their findings in order.

    A check that does not end within the time limit is a finding with the given fix. Its thread remains, and does not
    keep the process alive.
    """
    running = {name: start_thread(partial(_run, check), name) for name, check in checks.items()}
    deadline = time.monotonic() + seconds
    findings: list[Finding] = []
    for name, future in running.items():
        if not futures.wait([future], max(0.0, deadline - time.monotonic())).done:
            findings.append(fail(name, f"the check did not end within {seconds:g} s", fix))
        elif isinstance(error := future.exception(), (CamshaftError, OSError)):  # an error for users is a finding
            findings.append(fail(name, str(error), ""))
        else:
            findings += future.result()
    return findings


def _run(check: Check) -> list[Finding]:
    return list(check())


def worst(findings: Iterable[Finding]) -> Status:
    statuses: list[Status] = [finding.status for finding in findings]
    return max(statuses or ["OK"], key=ORDER.index)


def report(findings: Sequence[Finding]) -> str:
    """Format the findings as lines of text, with the fix below a problem, and a last line with the result."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for check, status, message, fix in findings:
        indent = " " * (width + 7)
        lines.append(f"{status:<4} {check:<{width}}  {_indented(message, indent)}")
        if fix:
            lines.append(f"{indent}fix: {_indented(fix, indent)}")
    counts = {status: sum(finding.status == status for finding in findings) for status in ORDER}
    lines.append("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()))
    return printable("\n".join(lines))


def report_json(findings: Sequence[Finding]) -> str:
    content = {"status": worst(findings), "findings": [finding._asdict() for finding in findings]}
    return mask_text(json.dumps(content, indent=2))


def _indented(text: str, indent: str) -> str:
    return text.strip().replace("\n", f"\n{indent}")
