"""Speed and memory of actor and critic updates, compared with loops that a user would write or choose.

    python benchmarks/train_step.py --against careful,transformers,trainer
    python benchmarks/train_step.py --models 4M --against careful --rounds 12 --threads 1,2 --out results
    python benchmarks/train_step.py --role critic --against careful,transformers

- camshaft: `ActorWorker.update_actor` or `CriticWorker.update_critic` on the reference engine.
- careful: the loop of `careful.py`.
- transformers: the textbook loop of `textbook.py`.
- trainer: `transformers.Trainer`, which has no critic.

The batch comes from `workload.py`: 128 rows, two optimizer steps, float32. In the first round, sides that compute the
same loss must report the same losses and gradient norms.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import roofline
import torch
import workload
from paired import Case, Sides, main, middle, ratio, serve


def build(name: str, case: Case) -> Callable[[int], dict[str, float]]:
    """Build one side; the result runs a round."""
    loop = loop_of(name, case["role"])(Path(case["folder"]))
    return lambda number: loop.update(rows_of(case, number))


def rows_of(case: Case, number: int) -> workload.Rows:
    """Return the rows of a round, the same for all sides."""
    sizes = {name: case[name] for name in ("count", "longest_response") if name in case}
    return workload.training_rows(workload.SHAPES[case["model"]].vocab_size, number, **sizes)


def work_of(case: Case, rows: workload.Rows) -> roofline.Work:
    """Return the minimum work of an update of these rows."""
    groups = roofline.groups_of([len(p) for p in rows.prompts], [len(r) for r in rows.responses])
    steps = len(rows) // case.get("mini_batch", workload.MINI_BATCH)
    return roofline.update(workload.SHAPES[case["model"]], groups, steps, case["role"])


def loop_of(name: str, role: str) -> Any:
    """Return the class of a side."""
    actor = role == "actor"
    if name == "camshaft":
        from camshaft_side import ActorUpdate, CriticUpdate

        return ActorUpdate if actor else CriticUpdate
    if name == "careful":
        from careful import CarefulCritic, CarefulLoop

        return CarefulLoop if actor else CarefulCritic
    from textbook import TextbookCritic, TextbookLoop, TrainerLoop

    return TrainerLoop if name == "trainer" else TextbookLoop if actor else TextbookCritic


def with_score(folder: Path) -> None:
    """Replace the model of the folder by a value model: one number per token, with a head that all sides load."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)


def compared(model: str, names: list[str], threads: int, rounds: int, role: str = "actor") -> list[dict[str, Any]]:
    """Return one result row per side."""
    names = [name for name in names if (name, role) != ("trainer", "critic")]
    return measured(Path(__file__).name, names, {"model": model, "role": role}, threads, rounds)


def measured(
    script: str, names: list[str], case: Case, threads: int, rounds: int, ranks: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Return one result row per side of a script, each on its number of ranks; ratios are relative to the first."""
    from camshaft.models.tiny import make_tiny_model

    shape, role = workload.SHAPES[case["model"]], case["role"]
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, **asdict(shape))
        (Path(folder) / "train.parquet").touch()
        if role == "critic":
            with_score(Path(folder))
        with Sides(script, names, {**case, "folder": folder}, threads) as sides:
            measurements = sides.rounds(rounds, alike=("loss", "grad_norm"))
    rows = [rows_of(case, number + 1) for number in range(rounds)]
    tokens = statistics.mean(sum(map(len, each.prompts)) + sum(map(len, each.responses)) for each in rows)
    work = sum((work_of(case, each) for each in rows), roofline.NOTHING) / rounds
    cores = {name: threads * (ranks or {}).get(name, 1) for name in names}
    rates = {count: roofline.measured_rates(count) for count in set(cores.values())}
    return [
        {
            "role": role,
            "model": case["model"],
            "threads": threads,
            "side": name,
            "seconds": middle(measurements, name, "wall"),
            "cpu_seconds": middle(measurements, name, "cpu"),
            "tokens_per_second": tokens / middle(measurements, name, "wall"),
            "tokens_per_cpu_second": tokens / middle(measurements, name, "cpu"),
            "memory_mib": middle(measurements, name, "memory") / 2**20,
            **roofline.reached(work, middle(measurements, name, "wall"), rates[cores[name]]),
            "cpu_ratio": ratio(measurements, name, names[0], "cpu"),
            "wall_ratio": ratio(measurements, name, names[0], "wall"),
            "memory_ratio": ratio(measurements, name, names[0], "memory"),
        }
        for name in names
    ]


COLUMNS = {
    "role": "{role}",
    "model": "{model}",
    "threads": "{threads}",
    "side": "{side}",
    "seconds": "{seconds:.2f}",
    "tokens / CPU s": "{tokens_per_cpu_second:.0f}",
    "memory, MiB": "{memory_mib:.0f}",
    **roofline.COLUMNS,
    "side / camshaft: CPU": "**{cpu_ratio:.2f}**",
    "wall": "{wall_ratio:.2f}",
    "memory": "{memory_ratio:.1f}",
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(build)
    else:
        models, against = ",".join(workload.SHAPES), "careful,transformers,trainer"
        main(__doc__ or "", compared, COLUMNS, models, against, choices={"role": ["actor", "critic"]})
