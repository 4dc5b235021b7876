"""Compare camshaft's speed ratios with the committed ones for this kind of processor.

    python benchmarks/check.py            # or: make bench-check; about five minutes
    python benchmarks/check.py --commit   # store this machine's ratios in results/ratios.json

A ratio is the wall time of another implementation divided by camshaft's, both measured in one run. Ratios depend on the
kind of processor (vendor and vector instructions), so `results/ratios.json` has one section for each kind. A ratio that
fell by more than the margin is measured again with twice the rounds before the check fails. A ratio without a committed
one is only printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import critic_step
import machine
import ppo_step
import train_step

RATIOS = Path(__file__).parent / "results" / "ratios.json"
MARGIN = 0.07
MODEL, ROUNDS = "1M", 5
CASES: dict[str, tuple[Callable[..., list[dict[str, Any]]], list[str]]] = {
    "train_step": (train_step.compared, ["careful", "transformers"]),
    "ppo_step": (ppo_step.compared, ["careful"]),
    "critic_step": (critic_step.compare, ["careful"]),
}

Ratios = dict[str, dict[str, float]]


def committed() -> dict[str, Ratios]:
    """Return the committed ratios: kind of processor, benchmark, side."""
    return json.loads(RATIOS.read_text(encoding="utf-8"))


def nearest(kind: str, kinds: list[str]) -> str | None:
    """Return the committed kind to compare `kind` with: the same one, else another of the same vendor."""
    vendor = kind.split()[0]
    return kind if kind in kinds else next((other for other in kinds if other.split()[0] == vendor), None)


def slower(name: str, before: dict[str, float], now: dict[str, float]) -> list[str]:
    """Describe each ratio that fell by more than the margin."""
    return [
        f"{name}: {side} takes {ratio:.2f} times as long as camshaft; committed: {before[side]:.2f}"
        for side, ratio in now.items()
        if ratio < before.get(side, 0) * (1 - MARGIN)
    ]


def measure(name: str, rounds: int) -> dict[str, float]:
    """Return the wall-time ratio of each side of a benchmark."""
    compared, sides = CASES[name]
    rows = compared(MODEL, ["camshaft", *sides], 1, rounds)
    ratios = {row["side"]: round(row["wall_ratio"], 3) for row in rows if row["side"] in sides}
    print(f"{name}: {ratios}", flush=True)
    return ratios


def check(before: Ratios) -> list[str]:
    """Measure every benchmark and return the ratios that fell, as sentences."""
    failures = []
    for name in CASES:
        for rounds in (ROUNDS, 2 * ROUNDS):
            fallen = slower(name, before.get(name, {}), measure(name, rounds))
            if not fallen:
                break
        failures += fallen
    return failures


def main(arguments: list[str]) -> int:
    kind, ratios = machine.kind(), committed()
    if arguments == ["--commit"]:
        ratios[kind] = {name: measure(name, 2 * ROUNDS) for name in CASES}
        RATIOS.write_text(json.dumps(ratios, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    reference = nearest(kind, list(ratios))
    if reference is None:
        print(f"no committed ratios for {kind} (committed: {', '.join(ratios)}); store them with --commit")
        return 0
    print(f"this machine: {kind}; compared with: {reference}")
    failures = check(ratios[reference])
    print("\n".join(failures) or f"no ratio fell by more than {MARGIN:.0%}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
