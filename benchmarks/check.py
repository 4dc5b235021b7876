"""Has camshaft become slower beside other ways to do the same work than the committed results say?

    python benchmarks/check.py            # or: make bench-check; one and a half minutes, up to three if a ratio fell

Only ratios by CPU time are compared, for they travel best between machines. A ratio that fell by more than the margin
is measured once more, with twice the rounds, before it counts: a busy machine should not fail a change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ppo_step
import train_step

RESULTS = Path(__file__).parent / "results"
MARGIN = 0.15
MODEL, ROUNDS = "1M", 3
CASES: dict[str, tuple[Callable[..., list[dict[str, Any]]], list[str]]] = {
    "train_step": (train_step.compared, ["careful", "transformers"]),
    "ppo_step": (ppo_step.compared, ["careful"]),
}


def committed(name: str) -> dict[str, float]:
    """The ratio of each side on one thread; of updates, those of the actor."""
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    case = {"model": MODEL, "threads": 1, "role": "actor"}
    return {row["side"]: row["cpu_ratio"] for row in rows if {"role": "actor", **row}.items() >= case.items()}


def slower(name: str, before: dict[str, float], now: dict[str, float]) -> list[str]:
    """A sentence for each ratio that fell too far."""
    return [
        f"{name}: {side} takes {ratio:.2f} times what camshaft takes, and took {before[side]:.2f}"
        for side, ratio in now.items()
        if ratio < before[side] * (1 - MARGIN)
    ]


def main() -> int:
    found = []
    for name, (compared, sides) in CASES.items():
        for rounds in (ROUNDS, 2 * ROUNDS):
            rows = compared(MODEL, ["camshaft", *sides], 1, rounds)
            now = {row["side"]: row["cpu_ratio"] for row in rows if row["side"] in sides}
            complaints = slower(name, committed(name), now)
            print(f"{name}: {now}", flush=True)
            if not complaints:
                break
        found += complaints
    print("\n".join(found) or f"no ratio fell by more than {MARGIN:.0%}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
