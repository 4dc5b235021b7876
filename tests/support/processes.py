"""Is a process still there? Read from /proc, so that it needs no other package."""

import time
from collections.abc import Iterable
from pathlib import Path


def running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def still_running(pids: Iterable[int], seconds: float) -> list[int]:
    """Those that do not end within `seconds`."""
    deadline = time.monotonic() + seconds
    left = [pid for pid in pids if running(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if running(pid)]
    return left
