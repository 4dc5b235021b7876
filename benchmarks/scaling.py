"""Cost of an actor update as the model, the responses, the mini-batch and the number of ranks grow.

    python benchmarks/scaling.py --rounds 3 --out benchmarks/results/scaling
    taskset -c 1 python benchmarks/scaling.py --of model mini_batch     # on one core; ranks need one each

The careful loop (`careful.py`) does the same work on the same rows. As in `train_step.py`, responses have 1 to 128
tokens and the two optimizer steps have 64 rows each, except for the quantity that grows. Ranks belong to the sharded
engine: each is a process with one thread on one core. For ranks only wall time is measured, and ratios are relative to
one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import roofline
import workload
from paired import Case, arguments, report, serve, table
from train_step import measured, rows_of

GROWTH: dict[str, list[Case]] = {
    "model": [{"model": name} for name in ("1M", "4M", "18M")],
    "longest_response": [{"longest_response": longest} for longest in (32, 128, 512)],
    "mini_batch": [{"mini_batch": rows, "count": 2 * rows // workload.SAMPLES} for rows in (16, 64, 256)],
}
USUAL: Case = {
    "model": "1M",
    "role": "actor",
    "longest_response": workload.LONGEST_RESPONSE,
    "mini_batch": workload.MINI_BATCH,
    "count": workload.PROMPTS,
}
RANKS = {"1 rank": 1, "2 ranks": 2}
UNKNOWN = dict.fromkeys(("cpu_seconds", "tokens_per_cpu_second", "cpu_ratio", "memory_mib", "memory_ratio"))
"""Columns that are not measured for ranks in other processes."""


def build(name: str, case: Case) -> Callable[[int], dict[str, float]]:
    """Build one side; the result runs a round."""
    folder, mini_batch = Path(case["folder"]), case["mini_batch"]
    if name == "careful":
        from careful import CarefulLoop

        loop: Any = CarefulLoop(folder, mini_batch=mini_batch)
    else:
        from camshaft_side import ActorUpdate, ActorUpdateOnRanks

        sizes = {
            "actor_rollout_ref.actor.ppo_mini_batch_size": mini_batch // workload.SAMPLES,
            "data.train_batch_size": case["count"],
            "data.max_response_length": case["longest_response"],
        }
        loop = ActorUpdate(folder, **sizes) if name == "camshaft" else ActorUpdateOnRanks(folder, RANKS[name])
    return lambda number: loop.update(rows_of(case, number))


def growing(what: str, rounds: int) -> list[dict[str, Any]]:
    """Return the result rows while one quantity grows."""
    script = Path(__file__).name
    if what == "ranks":
        rows = measured(script, list(RANKS), {**USUAL, "model": "4M"}, 1, rounds, RANKS)
        return [row | UNKNOWN | {"grows": what, "size": "4M"} for row in rows]
    cases = [(change[what], {**USUAL, **change}) for change in GROWTH[what]]
    sides = ["camshaft", "careful"]
    return [{"grows": what, "size": n, **row} for n, case in cases for row in measured(script, sides, case, 1, rounds)]


COLUMNS = {
    "what grows": "{grows}",
    "": "{size}",
    "side": "{side}",
    "tokens / s": "{tokens_per_second:.0f}",
    "tokens / CPU s": "{tokens_per_cpu_second:.0f}",
    "memory, MiB": "{memory_mib:.0f}",
    **roofline.COLUMNS,
    "side / first: CPU": "**{cpu_ratio:.2f}**",
    "wall": "{wall_ratio:.2f}",
}


def main() -> None:
    parser, quantities = arguments(__doc__ or ""), (*GROWTH, "ranks")
    parser.add_argument("--of", choices=quantities, nargs="+", default=quantities, help="what grows (default: all)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for what in options.of:
        rows += growing(what, options.rounds)
        print(table(rows, COLUMNS), flush=True)
    report(__doc__ or "", rows, COLUMNS, options.out, f"{options.rounds} rounds")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(build)
    else:
        main()
