"""What an update of the actor costs as the model, the responses, the mini-batch and the number of ranks grow.

    python benchmarks/scaling.py --rounds 3 --out benchmarks/results/scaling

The careful loop of `careful.py` does the same work on the same rows. Half a response is its mean length; one optimizer
step for each mini-batch, 128 rows in two steps unless the row says otherwise; float32, one thread. Tokens are those of
prompts and responses. The ranks are those of the sharded engine, one thread each; a rank's CPU time is not the
driver's, so theirs is wall time, and needs a core for each.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import workload
from paired import Case, Sides, arguments, middle, ratio, report, serve, table
from roofline import matmul_rate, update_operations

DEFAULT: Case = {
    "model": "1M",
    "longest": workload.LONGEST_RESPONSE,
    "prompts": workload.PROMPTS,
    "mini_batch": workload.MINI_BATCH,
}
GROWTH: dict[str, list[Case]] = {
    "model": [{"model": name} for name in ("1M", "4M", "18M")],
    "longest response": [{"longest": longest} for longest in (32, 128, 512)],
    "rows of a mini-batch": [{"mini_batch": rows, "prompts": 2 * rows // workload.SAMPLES} for rows in (16, 64, 256)],
}
RANKS = (1, 2)


def build(name: str, case: Case) -> Callable[[int], dict[str, float]]:
    """One side, ready for its rounds."""
    folder, mini_batch = Path(case["folder"]), case["mini_batch"]
    if name == "careful":
        from careful import CarefulLoop

        loop: Any = CarefulLoop(folder, mini_batch=mini_batch)
    else:
        from camshaft_side import ActorUpdate, ActorUpdateOnRanks

        sizes = {
            "actor_rollout_ref.actor.ppo_mini_batch_size": mini_batch // workload.SAMPLES,
            "data.train_batch_size": case["prompts"],
            "data.max_response_length": case["longest"],
        }
        loop = ActorUpdate(folder, **sizes) if name == "camshaft" else ActorUpdateOnRanks(folder, int(name.split()[0]))
    return lambda number: loop.update(rows_of(case, number))


def rows_of(case: Case, number: int) -> workload.Rows:
    vocabulary = workload.SHAPES[case["model"]].vocab_size
    return workload.training_rows(vocabulary, number, case["prompts"], case["longest"])


def measured(case: Case, names: list[str], clock: str, rounds: int) -> list[dict[str, Any]]:
    """A row of the result for each side; the first is what the others are compared with."""
    from camshaft.models.tiny import make_tiny_model

    shape = workload.SHAPES[case["model"]]
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, **shape.options())
        (Path(folder) / "train.parquet").touch()
        with Sides(Path(__file__).name, names, {**case, "folder": folder}, threads=1) as sides:
            found = sides.rounds(rounds, alike=("loss", "grad_norm"))
    every = [rows_of(case, number + 1) for number in range(rounds)]
    tokens = statistics.mean(sum(map(len, each.prompts)) + sum(map(len, each.responses)) for each in every)
    operations = statistics.mean(update_operations(shape, each) for each in every)
    rate = matmul_rate()
    return [
        {
            "side": name,
            "tokens_per_second": tokens / middle(found, name, clock),
            "memory_mib": middle(found, name, "memory") / 2**20,
            "of_matmul_rate": operations / middle(found, name, clock) / rate,
            "ratio": ratio(found, name, names[0], clock),
        }
        for name in names
    ]


COLUMNS = {
    "what grows": "{grows}",
    "": "{size}",
    "side": "{side}",
    "tokens / s": "{tokens_per_second:.0f}",
    "memory, MiB": "{memory_mib:.0f}",
    "of matmul rate": "{of_matmul_rate:.0%}",
    "time / that of the first side": "**{ratio:.2f}**",
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--of", default=",".join((*GROWTH, "ranks")), help="what grows (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for grows in options.of.split(","):
        for change in GROWTH.get(grows, []):
            rows = measured({**DEFAULT, **change}, ["camshaft", "careful"], "cpu", options.rounds)
            found += [{"grows": grows, "size": next(iter(change.values())), **row} for row in rows]
            print(table(found, COLUMNS), flush=True)
        if grows == "ranks":
            rows = measured({**DEFAULT, "model": "4M"}, [f"{ranks} ranks" for ranks in RANKS], "wall", options.rounds)
            found += [{"grows": grows, "size": "4M", **row} for row in rows]
            print(table(found, COLUMNS), flush=True)
    report(__doc__ or "", found, COLUMNS, options.out, f"{options.rounds} rounds")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(build)
    else:
        main()
