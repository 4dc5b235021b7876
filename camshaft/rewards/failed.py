"""The samples that a reward function failed on, or took long for, as lines of JSON in the run's folder.

    failed = FailedSamples(folder / "rewards" / "failed.jsonl")
    failed.add(result.failures, "step 12")

The file is made when there is something to say. It holds the newest: a full one becomes `failed.1.jsonl`, and the one
that was called so is gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from camshaft.rewards.manager import RewardFailure

MAX_BYTES = 8 * 1024 * 1024
"""A file that has so many is full."""


class FailedSamples:
    """One file, written by one run."""

    def __init__(self, path: Path):
        self.path = path.expanduser()

    def add(self, failures: Iterable[RewardFailure], when: str) -> None:
        """A line for each."""
        lines = [json.dumps({"when": when} | asdict(one), default=str) + "\n" for one in failures]
        if not lines:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size >= MAX_BYTES:
            self.path.replace(self.path.with_suffix(".1.jsonl"))
        with open(self.path, "a", encoding="utf-8") as out:
            out.writelines(lines)
