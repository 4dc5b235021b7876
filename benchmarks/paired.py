"""Compare two or more implementations of the same work, each in a separate process, in turns.

    with Sides("train_step.py", ["camshaft", "careful"], case, threads=1) as sides:
        rounds = sides.rounds(8)                    # the order of the sides changes from round to round
    ratio(rounds, "careful", "camshaft", "cpu")     # median over the rounds: above 1 camshaft is faster

A script started with `--serve` calls `serve`, which builds one side and runs one round per request while the other
sides sleep. All sides use the same data, and each round uses new data. Other work on the machine affects all sides of a
round alike, so the ratio within a round is the most stable number. Only ratios are comparable between machines.
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
"""For each side of one round: `wall` and `cpu` in seconds, `memory` in bytes, and its `result`."""


def serve(build: Callable[[str, Case], Callable[[int], Any]]) -> None:
    """Build the side of the command line and run one round per line of stdin."""
    name, case = sys.argv[2], json.loads(sys.argv[3])
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of libraries out of the protocol
    torch.set_num_threads(case["threads"])
    run = build(name, case)
    output.write("ready\n")
    output.flush()
    for line in sys.stdin:
        before = forget_peak()
        wall, cpu = time.perf_counter(), cpu_seconds()
        result = run(int(line))
        spent = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}
        memory = max(peak() - before, 1 << 20)  # the resolution of the kernel's counter
        output.write(json.dumps({**spent, "memory": memory, "result": result}) + "\n")
        output.flush()


class Sides:
    """The processes of one comparison."""

    def __init__(
        self, script: str, names: Sequence[str], case: Case, threads: int, python: dict[str, str] | None = None
    ):
        path, settings = str(Path(__file__).parent / script), json.dumps({**case, "threads": threads})
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.processes = {
            name: subprocess.Popen(
                [(python or {}).get(name, sys.executable), path, "--serve", name, settings],
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
        """Run a warm-up round, in which all sides must agree on the results in `alike`, and then `count` rounds."""
        agree(self._round(-1), alike)
        return [self._round(number) for number in range(count)]

    def _round(self, number: int) -> Round:
        names = list(self.processes)
        shift = number % len(names)
        sides: Round = {}
        for name in names[shift:] + names[:shift]:
            stdin = self.processes[name].stdin
            assert stdin is not None
            stdin.write(f"{number + 1}\n")
            stdin.flush()
            sides[name] = json.loads(self._answer(name))
        return sides

    def _answer(self, name: str) -> str:
        stdout = self.processes[name].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit(f"{name} ended with status {self.processes[name].wait()}; its error is above")
        return line


def ratio(rounds: Sequence[Round], other: str, side: str, what: str) -> float:
    """Return the median over the rounds of the other side's cost divided by this side's."""
    return statistics.median(each[other][what] / max(each[side][what], 1e-9) for each in rounds)


def middle(rounds: Sequence[Round], name: str, what: str) -> float:
    return statistics.median(each[name][what] for each in rounds)


def agree(sides: Round, alike: Sequence[str], within: float = 1e-3) -> None:
    """Exit if sides that report these numbers disagree, because then they compute different things.

    Call it for the first round only: rounding differences grow from step to step.
    """
    for key in alike:
        values = {name: spent["result"][key] for name, spent in sides.items() if key in spent["result"]}
        if not math.isclose(min(values.values()), max(values.values()), rel_tol=within, abs_tol=within):
            raise SystemExit(f"these sides computed different things, {key}: {values}")


def table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """Build a Markdown table; `columns` maps headings to format strings. A cell without its numbers is empty."""

    def cell(form: str, row: dict[str, Any]) -> str:
        complete = all(row[name] is not None for _, name, _, _ in Formatter().parse(form) if name)
        return form.format(**row) if complete else ""

    lines = [
        list(columns),
        ["---"] * len(columns),
        *([cell(form, row) for form in columns.values()] for row in rows),
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def arguments(about: str) -> argparse.ArgumentParser:
    """Build a parser with the arguments of all scripts."""
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
    """Run a script's comparison for each model and number of threads.

    `choices` maps further options of the script to their values; users can give several, separated by commas.
    """
    parser = arguments(about)
    parser.add_argument("--against", default=against)
    parser.add_argument("--models", default=models)
    parser.add_argument("--threads", default="1")
    choices = choices or {}
    for name, values in choices.items():
        parser.add_argument(f"--{name}", default=values[0], help=", ".join(values))
    options = parser.parse_args()
    names, rows = ["camshaft", *options.against.split(",")], []
    lists = [getattr(options, name).split(",") for name in (*choices, "models", "threads")]
    for *chosen, model, threads in itertools.product(*lists):
        rows += compared(model, names, int(threads), options.rounds, **dict(zip(choices, chosen, strict=True)))
        print(table(rows, columns), flush=True)
    report(about, rows, columns, options.out, f"{options.rounds} rounds")


def report(about: str, rows: Sequence[dict[str, Any]], columns: dict[str, str], out: str | None, how: str) -> None:
    """Write the rows and the machine as Markdown and JSON."""
    if out is None:
        return
    title, _, rest = about.partition("\n\n")
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    text = [f"# {title.rstrip('.')}", rest.partition("\n\n")[2].strip(), f"{machine()}; {how}. `{command}`"]
    note = "Seconds and memory are medians over the rounds; ratios are medians of the ratios per round, and above 1 "
    text += [f"{note}camshaft is faster or uses less memory. {roofline.sentence(rows)}", table(rows, columns)]
    Path(f"{out}.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    record = {"machine": machine(), "command": command, "rows": rows}
    Path(f"{out}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def peak() -> int:
    """Return the peak memory of this process since `forget_peak` in bytes; 0 if the system does not report it."""
    return _status("VmHWM")


def forget_peak() -> int:
    """Reset the peak memory and return the present memory in bytes."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _status("VmRSS")


def _status(field: str) -> int:
    if not Path("/proc/self/status").exists():
        return 0
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
