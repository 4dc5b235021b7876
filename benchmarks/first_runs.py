"""Seconds of a step of a first run, with the defaults and with other settings or an earlier version.

    python benchmarks/first_runs.py --settings "two ranks=devices=2" --out benchmarks/results/first_runs.md
    python benchmarks/first_runs.py --earlier ../earlier/.venv/bin/python     # of a checkout of another commit

Both tasks are trained by `camshaft ppo` as a user would: the digits of docs/tutorials/own-task.md, and the letters of
own_task/. All sides take turns in every round, in an order that changes from round to round. A time of a run is the
median over its steps without the first two; of a side, the median over the rounds. A ratio is the median of the ratios
per round to the defaults, and below 1 the side is faster. The last columns are for the whole command, with its start.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from machine import machine
from own_task import make_task

DEFAULTS = "defaults"
PHASES = {"update": "timing_s/update_actor", "generation": "timing_s/gen", "step": "timing_s/step"}
WHOLE = ("wall time", "CPU time")
KEYS = ["algorithm=grpo", "lr=3e-3", "batch=16", "response_length=16", "model=models/tiny", "trainer.save_freq=-1"]
DIGITS = "def digits(response):\n    return sum(c.isdigit() for c in response) / max(len(response), 1)\n"
LETTERS = "def share(response, letters):\n    return sum(c in letters for c in response) / max(len(response), 1)\n"
TASKS = {
    "tutorial": ["data=digits.jsonl", "reward=digits.py"],
    "own_task": ["data=train.jsonl", "val_data=val.jsonl", "reward=letters.py"],
}


def write_tasks(folder: Path) -> None:
    """Write the model, the data and the rewards of both tasks."""
    make_task(folder)
    rows = [json.dumps({"prompt": f"Write digits. Seed: {number}"}) + "\n" for number in range(64)]
    (folder / "digits.jsonl").write_text("".join(rows), encoding="utf-8")
    (folder / "digits.py").write_text(DIGITS, encoding="utf-8")
    (folder / "letters.py").write_text(LETTERS, encoding="utf-8")


def run(python: str, words: Sequence[str], folder: Path, threads: int | None) -> dict[str, float]:
    """Train in a new run folder, and return the seconds of each phase and of the command."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command, began = [python, "-m", "camshaft", "ppo", *words, f"out={out}/run"], time.monotonic()
        with open(f"{out}/log", "w+", encoding="utf-8") as log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            wall = time.monotonic() - began
            if status:
                log.seek(0)
                raise SystemExit(f"{' '.join(command)} failed\n{log.read()}")
        lines = [json.loads(line) for line in Path(f"{out}/run/metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [line for line in lines if PHASES["step"] in line][2:]
    seconds = {name: statistics.median(line[key] for line in steps) for name, key in PHASES.items()}
    return seconds | {"wall time": wall, "CPU time": usage.ru_utime + usage.ru_stime}


def rows(task: str, sides: Mapping[str, Sequence[str]], rounds: int) -> list[list[str]]:
    """Return the cells of each side of a task."""
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        for number in range(rounds):
            shift = number % len(sides)
            for side in [*sides][shift:] + [*sides][:shift]:
                python, threads, *words = sides[side]
                words = [*KEYS, *TASKS[task], *words]
                seconds[side].append(run(python, words, folder, int(threads) if threads else None))
            print(f"{task}: round {number + 1}, load {os.getloadavg()[0]:.1f}", seconds, file=sys.stderr, flush=True)
    cells: list[list[str]] = []
    for side, runs in seconds.items():
        row = [task, side]
        for part in (*PHASES, *WHOLE):
            ratio = statistics.median(
                each[part] / default[part] for each, default in zip(runs, seconds[DEFAULTS], strict=True)
            )
            row.append(f"{statistics.median(each[part] for each in runs):.3g} ({ratio:.2f})")
        cells.append(row)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--settings", action="append", default=[], metavar="NAME=OVERRIDES", help="another side")
    parser.add_argument("--threads", action="append", default=[], metavar="NUMBER", help="a side with OMP_NUM_THREADS")
    parser.add_argument("--earlier", help="Python of a checkout of an earlier version, which is another side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    steps = f"steps={options.steps}"
    sides = {DEFAULTS: [sys.executable, "", steps]}
    sides |= {f"OMP_NUM_THREADS={number}": [sys.executable, number, steps] for number in options.threads}
    for setting in options.settings:
        name, _, words = setting.partition("=")
        sides[name] = [sys.executable, "", steps, *words.split()]
    if options.earlier:
        sides["earlier version"] = [options.earlier, "", steps]
    titles = ["task", "side", *PHASES, *WHOLE]
    table = [titles, ["---"] * len(titles)]
    for task in options.tasks:
        table += rows(task, sides, options.rounds)
    lines = [f"| {' | '.join(row)} |" for row in table]
    load = f"load average {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores"
    text = "\n".join([f"{machine()}; {options.rounds} rounds of {options.steps} steps; {load}.", "", *lines, ""])
    print(text)
    if options.out:
        options.out.write_text(f"# Steps of first runs\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
