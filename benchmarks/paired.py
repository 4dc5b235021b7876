"""Two or more ways to do the same work, in turns, each in a process of its own; and what their ratios say.

    with Sides("train_step.py", ["camshaft", "careful"], case, threads=1) as sides:
        rounds = sides.rounds(8)                    # the order of the sides changes from round to round
    ratio(rounds, "careful", "camshaft", "cpu")     # median over the rounds: above 1 camshaft is faster

The script calls `serve` where it is started with `--serve`: it builds one side, and does a round each time it is told.
The others sleep meanwhile. Each round has its own data, the same for all sides. Other work on the machine disturbs
all sides alike, and the ratio within a round the least; only ratios are compared between machines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import roofline
import torch
from machine import cpu_seconds, machine

Case = dict[str, Any]
Round = dict[str, dict[str, Any]]
"""What each side spent in one round: `wall` and `cpu` in seconds, `memory` in bytes, and what it `told`."""


def serve(build: Callable[[str, Case], Callable[[int], Any]]) -> None:
    """Be one side: build it from its name and the case on the command line, and do the rounds that stdin asks for."""
    name, case = sys.argv[2], json.loads(sys.argv[3])
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    torch.set_num_threads(case["threads"])
    run = build(name, case)
    output.write("ready\n")
    output.flush()
    for line in sys.stdin:
        before = forget_peak()
        wall, cpu = time.perf_counter(), cpu_seconds()
        told = run(int(line))
        spent = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}
        memory = max(peak() - before, 1 << 20)  # the system counts no finer
        output.write(json.dumps({**spent, "memory": memory, "told": told}) + "\n")
        output.flush()


class Sides:
    """The processes of one comparison."""

    def __init__(
        self, script: str, names: Sequence[str], case: Case, threads: int, python: dict[str, str] | None = None
    ):
        path, words = str(Path(__file__).parent / script), json.dumps({**case, "threads": threads})
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.processes = {
            name: subprocess.Popen(
                [(python or {}).get(name, sys.executable), path, "--serve", name, words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, env=environment, text=True,
            )
            for name in names
        }  # fmt: skip
        for name in names:
            self._answer(name)

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def rounds(self, count: int, alike: Sequence[str] = ()) -> list[Round]:
        """After a first one that does not count, in which all have to tell the same of what `alike` names."""
        agree(self._round(-1), alike)
        return [self._round(number) for number in range(count)]

    def _round(self, number: int) -> Round:
        names = list(self.processes)
        shift = number % len(names)
        found: Round = {}
        for name in names[shift:] + names[:shift]:
            stdin = self.processes[name].stdin
            assert stdin is not None
            stdin.write(f"{number + 1}\n")
            stdin.flush()
            found[name] = json.loads(self._answer(name))
        return found

    def _answer(self, name: str) -> str:
        stdout = self.processes[name].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit(f"{name} ended with status {self.processes[name].wait()}; its error is above")
        return line


def ratio(rounds: Sequence[Round], other: str, own: str, what: str) -> float:
    """How many times as much the other side spent: the median of the rounds."""
    return statistics.median(each[other][what] / max(each[own][what], 1e-9) for each in rounds)


def middle(rounds: Sequence[Round], name: str, what: str) -> float:
    return statistics.median(each[name][what] for each in rounds)


def agree(found: Round, alike: Sequence[str], within: float = 1e-3) -> None:
    """All sides that tell these numbers tell the same: a faster way to compute something else is none.

    For sides that start alike: from step to step, what rounding did to the last one grows.
    """
    for key in alike:
        told = {name: spent["told"][key] for name, spent in found.items() if key in spent["told"]}
        if not math.isclose(min(told.values()), max(told.values()), rel_tol=within, abs_tol=within):
            raise SystemExit(f"these sides computed different things, {key}: {told}")


def table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """Markdown: a heading and a format of a row's numbers for each column; empty where the row has none."""

    def cell(form: str, row: dict[str, Any]) -> str:
        known = all(row[name] is not None for _, name, _, _ in Formatter().parse(form) if name)
        return form.format(**row) if known else ""

    lines = [
        list(columns),
        ["---"] * len(columns),
        *([cell(form, row) for form in columns.values()] for row in rows),
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def arguments(about: str) -> argparse.ArgumentParser:
    """What every script takes."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", help="write the table to <out>.md and the numbers to <out>.json")
    return parser


def main(
    about: str,
    compared: Callable[..., list[dict[str, Any]]],
    columns: dict[str, str],
    models: str,
    against: str,
    choices: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """The command line of a script: its comparison for each model and number of threads.

    `choices`: options of its own, with the values that they take; several with commas between them.
    """
    parser = arguments(about)
    parser.add_argument("--against", default=against)
    parser.add_argument("--models", default=models)
    parser.add_argument("--threads", default="1")
    choices = choices or {}
    for name, values in choices.items():
        parser.add_argument(f"--{name}", default=values[0], help=", ".join(values))
    options = parser.parse_args()
    names, found = ["camshaft", *options.against.split(",")], []
    lists = [getattr(options, name).split(",") for name in (*choices, "models", "threads")]
    for *chosen, model, threads in itertools.product(*lists):
        found += compared(model, names, int(threads), options.rounds, **dict(zip(choices, chosen, strict=True)))
        print(table(found, columns), flush=True)
    report(about, found, columns, options.out, f"{options.rounds} rounds")


def report(about: str, rows: Sequence[dict[str, Any]], columns: dict[str, str], out: str | None, how: str) -> None:
    """The result as a page and as JSON, with what it was measured on."""
    if out is None:
        return
    title, _, rest = about.partition("\n\n")
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = [f"# {title.rstrip('.')}", rest.partition("\n\n")[2].strip(), f"{machine()}; {how}. `{command}`"]
    note = "Seconds and memory are medians over the rounds; ratios are medians of the ratios per round, and above 1 "
    text += [f"{note}camshaft is faster or uses less memory. {roofline.sentence(rows)}", table(rows, columns)]
    Path(f"{out}.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    told = {"machine": machine(), "command": command, "rows": rows}
    Path(f"{out}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def peak() -> int:
    """The most memory that this process had since `forget_peak`, in bytes; 0 where the system does not tell."""
    return _status("VmHWM")


def forget_peak() -> int:
    """Start to look for the peak anew; returns what the process has now."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def _status(field: str) -> int:
    if not Path("/proc/self/status").exists():
        return 0
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
