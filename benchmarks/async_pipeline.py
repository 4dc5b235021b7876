"""Wall time of asynchronous training against the synchronous layouts of as many threads, on long-tailed lengths.

    python benchmarks/async_pipeline.py --out benchmarks/results/async_pipeline.md

GRPO with random weights, so that the lengths of the responses are nearly geometric (mean about 100, limit 384) and a
generation ends long after most of its rows. With a limit of 16, most responses have this length. The learning rate is
so small that the lengths do not change.

- sync, 1 thread: one process with one thread.
- sync, 2 threads: one process with two threads.
- sync, 2 ranks: two processes with one thread each.
- pipeline: one thread trains and one generates, `max_staleness=1`. The actor, the rollout and the driver are processes.

Every run has the same prompts, seeds and correction (`bypass_mode`). Each round runs all layouts, one after the other.
The table has the seconds of a step by wall time, from the first step after the warm-up to the last, with samples and
metrics written. The ratios are those within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from machine import machine

from camshaft.data import write_arithmetic
from camshaft.models.tiny import make_tiny_model
from camshaft.tracking.jsonl import read_metrics

LAYOUTS = {
    "sync, 1 thread": (1, ("engine=reference",)),
    "sync, 2 threads": (2, ("engine=reference",)),
    "sync, 2 ranks": (1, ("engine=fsdp", "trainer.n_gpus_per_node=2")),
    "pipeline, 1 + 1 threads": (1, ("engine=reference", "max_staleness=1")),
}
"""Value of OMP_NUM_THREADS, and overrides."""
WARM_UP = 3
"""Steps that are not measured: the first ones start workers and, in the pipeline, have no batch to learn meanwhile."""
REWARD = "def compute_score(response):\n    return float(response.count('e'))\n"
RESPONSES, GROUP, LIMIT, SHORT = 64, 8, 384, 16


def run(folder: Path, layout: str, steps: int, limit: int) -> dict[str, float]:
    """Train with a layout, and return seconds per step and means of metrics over the measured steps."""
    threads, overrides = LAYOUTS[layout]
    with tempfile.TemporaryDirectory(dir=folder) as out:
        words = [
            *(f"model={folder / 'model'}", f"data={folder / 'data' / 'train.parquet'}", "val_data=null"),
            *(f"reward={folder / 'reward.py'}", "algorithm=grpo", f"batch={RESPONSES // GROUP}", f"n={GROUP}"),
            *(f"steps={steps}", "lr=1e-9", "prompt_length=16", f"response_length={limit}", f"out={out}/run"),
            *("device=cpu", "rollout=torch", "trainer.save_freq=-1", "trainer.logger=[jsonl]"),
            "algorithm.rollout_correction.bypass_mode=true",
            *overrides,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, "-m", "camshaft", "ppo", *words], check=True, env=environment, timeout=1800)
        lines = read_metrics(f"{out}/run/metrics.jsonl")[WARM_UP - 1 :]
    measured = lines[1:]
    seconds = (lines[-1]["timing/at"] - lines[0]["timing/at"]) / len(measured)
    names = ("perf/total_num_tokens", "timing_s/gen", "response_length/mean", "response_length/clip_ratio")
    names += ("async/trainer_wait_share", "async/generator_idle_share")
    means = {name: statistics.mean(line[name] for line in measured) for name in names if name in measured[0]}
    return {"seconds": seconds, **means}


def table(rounds: Sequence[dict[str, dict[str, float]]]) -> list[str]:
    """Return the lines of the table of one size of model."""
    lines = [
        "| layout | seconds per step in each round | tokens/s (median) | trainer waited for tokens | generator idle |",
        "|---|---|---|---|---|",
    ]
    for layout in LAYOUTS:
        runs = [results[layout] for results in rounds]
        seconds = ", ".join(f"{result['seconds']:.2f}" for result in runs)
        speed = statistics.median(result["perf/total_num_tokens"] / result["seconds"] for result in runs)
        waited = statistics.median(result["timing_s/gen"] / result["seconds"] for result in runs)
        idle = [result["async/generator_idle_share"] for result in runs if "async/generator_idle_share" in result]
        rest = f"{statistics.median(idle):.0%}" if idle else "-"
        lines.append(f"| {layout} | {seconds} | {speed:,.0f} | {waited:.0%} | {rest} |")
    *synchronous, pipeline = LAYOUTS
    for count, name in ((1, "1 thread"), (2, "the better of 1 and 2 threads"), (3, "the best synchronous layout")):
        others = synchronous[:count]
        ratios = [min(r[other]["seconds"] for other in others) / r[pipeline]["seconds"] for r in rounds]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines += ["", f"Pipeline against {name}: {each} times as fast; median {statistics.median(ratios):.2f}."]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--sizes",
        default=f"144x4,288x4,144x4:{SHORT}",
        help=f"hidden size x layers of each model, with :<maximum length of a response> if it is not {LIMIT}",
    )
    arguments = parser.parse_args()
    headline, _, _, *about = (__doc__ or "").strip().splitlines()
    lines = [f"# {headline}", *about, ""]
    lines += [f"Machine: {machine()}."]
    for size in arguments.sizes.split(","):
        shape, _, given = size.partition(":")
        hidden, layers, limit = *map(int, shape.split("x")), int(given or LIMIT)
        with tempfile.TemporaryDirectory(prefix="camshaft-async-") as name:
            folder = Path(name)
            make_tiny_model(folder / "model", hidden=hidden, layers=layers)
            write_arithmetic(folder / "data")
            (folder / "reward.py").write_text(REWARD, encoding="utf-8")
            parameters = (folder / "model" / "model.safetensors").stat().st_size / 4e6
            loads: list[float] = []
            rounds: list[dict[str, dict[str, float]]] = []
            for _ in range(arguments.rounds):
                loads.append(os.getloadavg()[0])
                rounds.append({layout: run(folder, layout, arguments.steps, limit) for layout in LAYOUTS})
        result = rounds[0]["sync, 1 thread"]
        mean, at_limit = result["response_length/mean"], result["response_length/clip_ratio"]
        lengths = f"mean {mean:.0f} tokens, {at_limit:.0%} at {limit}"
        busy = ", ".join(f"{load:.1f}" for load in loads)
        lines += [
            "",
            f"## {parameters:.1f}M parameters, up to {limit} tokens",
            "",
            f"{RESPONSES} responses per step, {lengths}. Load average",
        ]
        lines += [f"before each round: {busy}.", "", *table(rounds)]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
