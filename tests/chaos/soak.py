"""Run four layouts side by side for two hours and fail if a run's memory or another of its resources grows.

    python tests/chaos/soak.py --out benchmarks/results/soak.md           # two hours
    python tests/chaos/soak.py --minutes 5 --layouts local,ray            # a try

Each run trains a tiny model, saves and validates every 20 steps, and never ends by itself. Every ten seconds, the
script reads the counters of all processes of each run. A run fails if it ends, if in the second half its memory grows
by 1 kB per step or another counter grows, or if it leaves processes or files behind. SIGTERM ends the measurement
early. The tables are written every ten minutes and at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from machine import machine  # noqa: E402
from support.ppo_runs import ppo_args  # noqa: E402
from support.processes import marked, still_running  # noqa: E402

from chaos.chaos import LAYOUTS, SETTINGS, left_files, started, victims  # noqa: E402

SOAK: dict[str, Any] = {
    **SETTINGS,
    # The policy hardly changes, so lengths of responses and thus the work per step do not either.
    "actor_rollout_ref.actor.optim.lr": 1e-7,
    "critic.optim.lr": 1e-7,
    "trainer.total_epochs": 10**8,
    "trainer.total_training_steps": 10**8,
    "trainer.save_freq": 20,
    "trainer.test_freq": 20,
}
MEMORY_LIMIT = 1000.0
"""Largest growth of memory in the second half, in bytes per step."""
COUNTERS = ("descriptors", "threads", "processes", "shm_files", "shm_bytes", "temporary_files")
"""Counters that must not grow in the second half."""
WRITE_SECONDS = 600.0
END_SECONDS = 120.0
"""Time limit for a run to save and to end after SIGTERM, on a busy machine."""
SITECUSTOMIZE = """# Grow CPython's table of interned strings before the measurement.
import sys
[sys.intern(f"soak {i}") for i in range(215_000)]
"""
"""Module that each Python process of a run imports at its start. A process keeps 120,000 to 144,000 interned strings.
As others are added and deleted, their table doubles once, by 3.7 MiB, at a random step of the first hours. With this
module it doubles at the start. The number of strings fills the table during the imports that follow, so that CPython
rebuilds it before the process forks, and has room for thousands of steps afterwards."""
RAY_SETTINGS = {"RAY_local_gc_interval_s": "600"}
"""Interval at which Ray's daemon makes the processes of a run collect garbage, by default 90 minutes. The first time,
the daemon connects to each process, which adds descriptors and a thread."""
_PRIVATE_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]


@dataclass
class Soak:
    """A run and its samples."""

    layout: str
    process: subprocess.Popen[bytes]
    mark: str
    run: Path
    temporary: Path
    log: Path
    samples: list[dict[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def sample(self, begin: float) -> None:
        """Append the counters of this moment, or a problem if the run has ended."""
        if self.problems:
            return
        if self.process.poll() is not None:
            text = self.log.read_text(errors="replace")[-600:]
            self.problems.append(f"the run ended with status {self.process.returncode}: {text}")
            return
        step, counters = last_step(self.run / "metrics.jsonl"), self.counters()
        if step and "memory" in counters:  # the run has not just ended
            self.samples.append({"seconds": time.monotonic() - begin, "step": step, **counters})

    def counters(self) -> dict[str, float]:
        shared = Path(f"/proc/{self.process.pid}/root/dev/shm")
        return {
            **process_counters(self.process.pid, self.mark),
            **dict(zip(("shm_files", "shm_bytes"), folder_size(shared), strict=True)),
            **dict(zip(("temporary_files", "temporary_bytes"), folder_size(self.temporary), strict=True)),
        }

    def end(self) -> None:
        """End the run with SIGTERM, and look for what it leaves behind."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.problems.append(f"the run did not end within {END_SECONDS:g} s after SIGTERM")
            return
        if not self.problems and self.process.returncode != 128 + signal.SIGTERM:
            self.problems.append(f"status {self.process.returncode} after SIGTERM")
        left = still_running(marked(self.mark), 30.0)
        self.problems += [f"{len(left)} processes are left"] * bool(left)
        self.problems += [f"temporary file {path.name}" for path in left_files(self.temporary, 15.0)]

    def second_half(self) -> list[dict[str, float]]:
        half = self.samples[-1]["seconds"] / 2 if self.samples else 0.0
        return [sample for sample in self.samples if sample["seconds"] >= half]


def process_counters(driver: int, mark: str) -> dict[str, float]:
    """Return memory, descriptors and threads of all processes of a run, and memory by kind of process."""
    kinds = {pid: kind for kind, pids in victims(driver, mark).items() for pid in pids}
    totals: Counter[str] = Counter()
    for pid in {driver, *marked(mark)}:
        with contextlib.suppress(OSError, ValueError, KeyError):  # the process has ended
            folder = Path(f"/proc/{pid}")
            memory = _table(folder / "smaps_rollup")
            if not memory:
                continue
            # Pages of files are left out: their share changes with other programs that map the same libraries.
            size = 1024 * (memory["Pss_Anon"] + memory["Pss_Shmem"])
            totals[f"memory of {kinds.get(pid, 'others')}"] += size
            counts = {
                "memory": size,
                "rss": 1024 * memory["Rss"],
                "threads": _table(folder / "status")["Threads"],
                "descriptors": len(os.listdir(folder / "fd")),
                "processes": 1,
            }
            totals.update(counts)
    return {name: float(value) for name, value in totals.items()}


def _table(path: Path) -> dict[str, int]:
    """Read the numbers of a file of /proc with a line `Name:   123 kB` for each."""
    rows = (line.partition(":") for line in path.read_text().splitlines())
    return {name: int(text.split()[0]) for name, _, text in rows if text.split() and text.split()[0].isdigit()}


def folder_size(folder: Path) -> tuple[int, int]:
    """Return the number of files in a folder and its subfolders, and the space that they take in bytes."""
    files = space = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                space += 512 * os.lstat(os.path.join(parent, name)).st_blocks
                files += 1
    return files, space


def last_step(metrics: Path) -> int:
    """Return the step of the last complete line of `metrics.jsonl`, without reading the whole file. 0 if none."""
    with contextlib.suppress(FileNotFoundError), open(metrics, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 65536, 0))
        lines = file.read().splitlines(keepends=True)
        complete = [line for line in lines if line.startswith(b'{"step"') and line.endswith(b"\n")]
        return int(json.loads(complete[-1])["step"]) if complete else 0
    return 0


def slope(samples: Sequence[Mapping[str, float]], name: str) -> tuple[float, float]:
    """Return the growth of a counter per step: the least-squares slope and its standard error.

    Samples without the counter do not count.
    """
    samples = [sample for sample in samples if name in sample]
    steps, values = ([sample[key] for sample in samples] for key in ("step", name))
    if len(samples) < 3 or steps[0] == steps[-1]:
        return math.nan, math.nan
    fit = statistics.linear_regression(steps, values)
    residuals = sum((y - fit.intercept - fit.slope * x) ** 2 for x, y in zip(steps, values, strict=True))
    spread = sum((x - statistics.fmean(steps)) ** 2 for x in steps)
    return fit.slope, math.sqrt(residuals / (len(steps) - 2) / spread)


def growth(soak: Soak) -> list[str]:
    """Return the counters that grow in the second half: by 1 kB of memory per step, or by one unit."""
    half = soak.second_half()
    if len(half) < 3:
        return ["too few samples"]
    problems = []
    rate, _ = slope(half, "memory")
    if not rate < MEMORY_LIMIT:
        problems.append(f"memory grows by {rate:.0f} bytes per step")
    for name in COUNTERS:
        rate, error = slope(half, name)
        total = rate * (half[-1]["step"] - half[0]["step"])
        if not total < 1.0 and rate > 2 * error:
            problems.append(f"{name} grows by {total:.1f}")
    return problems


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def report(soaks: Sequence[Soak]) -> str:
    """Return the tables of all runs."""
    measured = [soak for soak in soaks if len(soak.second_half()) >= 3]
    head = ("layout", "steps", "memory, start of second half", "memory, end", "growth of memory per step", "problems")
    rows = [_memory_row(soak) for soak in soaks]
    others = [
        (soak.layout, name, *(f"{sample.get(name, 0.0):.0f}" for sample in (half[0], half[len(half) // 2], half[-1])),
         f"{max(sample.get(name, 0.0) for sample in soak.samples):.0f}", _rate(half, name, 1.0, ""))
        for soak in measured for half in [soak.second_half()] for name in (*COUNTERS, "temporary_bytes")
    ]  # fmt: skip
    counters = ("layout", "counter", "start of second half", "its middle", "end", "maximum of the run", "per step")
    kinds = [
        (soak.layout, name, *(f"{sample[name] / 2**20:.1f} MiB" for sample in (with_name[0], with_name[-1])),
         _rate(with_name, name, 1000.0, "kB"))
        for soak in measured for half in [soak.second_half()]
        for name in sorted({name for sample in half for name in sample if name.startswith("memory of ")})
        for with_name in [[sample for sample in half if name in sample]]
    ]  # fmt: skip
    parts = ("layout", "part", "start of second half", "end", "growth per step")
    return "\n\n".join((table(head, rows), table(counters, others), table(parts, kinds)))


def _memory_row(soak: Soak) -> tuple[str, ...]:
    half = soak.second_half()
    if len(half) < 3:
        return (soak.layout, *("-",) * 4, "; ".join([*soak.problems, "too few samples"]))
    ends = (sum(sample["memory"] for sample in part[:6]) / len(part[:6]) / 2**20 for part in (half, half[::-1]))
    steps = f"{soak.samples[-1]['step']:.0f}, {half[-1]['step'] - half[0]['step']:.0f} in the second half"
    problems = "; ".join(soak.problems) or "none"
    return (soak.layout, steps, *(f"{end:.1f} MiB" for end in ends), _rate(half, "memory", 1000.0, "kB"), problems)


def _rate(samples: Sequence[Mapping[str, float]], name: str, unit: float, symbol: str) -> str:
    rate, error = slope(samples, name)
    return f"{rate / unit:+.4f} ± {error / unit:.4f} {symbol}".strip()


def private_shared_memory() -> list[str]:
    """Return the command that gives a program its own /dev/shm; empty if this user may not mount."""
    permitted = shutil.which("unshare") and subprocess.run([*_PRIVATE_SHM, "true"], capture_output=True).returncode == 0
    return _PRIVATE_SHM if permitted else []


def soak_all(options: argparse.Namespace, folder: Path, stop: threading.Event) -> list[Soak]:
    """Run the layouts side by side, and sample them until the time is over or `stop` is set."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE)
    os.environ.update(RAY_SETTINGS)
    prefix = private_shared_memory()
    soaks: list[Soak] = []
    with contextlib.ExitStack() as stack:
        for layout in options.layouts.split(","):
            run, log, mark = folder / layout, folder / f"{layout}.log", uuid.uuid4().hex
            # The path is short because Ray creates sockets below it.
            temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp")))
            settings = {**SOAK, **LAYOUTS[layout], "trainer.default_local_dir": run}
            command = [*prefix, sys.executable, "-m", "camshaft", "ppo", *ppo_args(folder, settings)]
            process = stack.enter_context(started(command, mark, temporary, log, (site, ROOT)))
            soaks.append(Soak(layout, process, mark, run, temporary, log))
        begin = written = time.monotonic()
        while (now := time.monotonic()) < begin + 60 * options.minutes and not stop.wait(options.every):
            for soak in soaks:
                soak.sample(begin)
            if now > written + WRITE_SECONDS:
                write(soaks, options)
                written = now
        for soak in soaks:
            soak.problems += growth(soak)
            soak.end()
    return soaks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="length of the measurement (default: 120)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples (default: 10)")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="layouts, separated by commas")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--samples", type=Path, help="JSON file to write all samples to")
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with tempfile.TemporaryDirectory(prefix="soak-runs-") as folder:
        soaks = soak_all(options, Path(folder), stop)
    write(soaks, options)
    sys.stdout.write(report(soaks) + "\n")
    return 1 if any(soak.problems for soak in soaks) else 0


def write(soaks: Sequence[Soak], options: argparse.Namespace) -> None:
    """Write the tables, and the samples that they are made of."""
    if options.samples is not None:
        options.samples.write_text(json.dumps({soak.layout: soak.samples for soak in soaks}), encoding="utf-8")
    if options.out is not None:
        minutes = max((soak.samples[-1]["seconds"] for soak in soaks if soak.samples), default=0.0) / 60
        words = f"python tests/chaos/soak.py --minutes {options.minutes:g} --layouts {options.layouts}"
        note = f"`{words}`, {minutes:.0f} minutes on {machine()}:"
        options.out.write_text(f"{HEAD}\n{note}\n\n{report(soaks)}\n", encoding="utf-8")


HEAD = """# Soak

`make soak` trains four layouts side by side for two hours: `local` (one process), `fsdp` (two ranks), `process`
(generation in a process of its own) and `ray` (two ranks on Ray). Each run saves, validates and deletes older
checkpoints every 20 steps. Every ten seconds, the counters of all its processes are read from `/proc`. Memory is the
proportional size of anonymous and shared memory (`Pss_Anon` and `Pss_Shmem`). Growth per step is the least-squares
slope over the second half, with its standard error.
"""


if __name__ == "__main__":
    sys.exit(main())
