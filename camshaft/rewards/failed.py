"""Log of samples with failed or slow reward calls, as JSON lines in the run's folder.

    failed = FailedSamples(folder / "rewards" / "failed.jsonl")
    failed.add(result.failures, "step 12")

The file is created with the first failure. A full file is renamed to `failed.1.jsonl` and replaces the previous one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from camshaft.rewards.manager import RewardFailure

MAX_BYTES = 8 * 1024 * 1024
"""Size at which the file is rotated."""


class FailedSamples:
    """The log file of a run."""

    def __init__(self, path: Path):
        self.path = path.expanduser()

    def add(self, failures: Iterable[RewardFailure], when: str) -> None:
        """Append a line per failure."""
        lines = [json.dumps({"when": when} | asdict(one), default=str) + "\n" for one in failures]
        if not lines:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size >= MAX_BYTES:
            self.path.replace(self.path.with_suffix(".1.jsonl"))
        with open(self.path, "a", encoding="utf-8") as out:
            out.writelines(lines)
