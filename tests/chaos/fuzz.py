"""Fuzz configs, checkpoints and data files: no case may print a traceback, hang, or resume from a damaged file.

    python tests/chaos/fuzz.py                                              # 2,000 + 500 + 200 cases: half an hour
    python tests/chaos/fuzz.py --configs 100 --checkpoints 50 --data 20 --seed 7
    python tests/chaos/fuzz.py --only checkpoints:137                       # one case of the seed, with its output

This process imports everything once, and each case runs in a fork. A case fails if it prints a traceback, has another
exit status than 0, 1 or 2, or takes more than ten seconds. A run that resumes from a damaged checkpoint must also end
with weights that are bitwise identical to those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if str(ROOT / "tests") not in sys.path:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from support.command_line import Forked, Run, finished, sft_args  # noqa: E402
from support.ppo_runs import ppo_args, saved_weights  # noqa: E402

from camshaft.checkpoint.manager import LATEST  # noqa: E402
from camshaft.config import PPOConfig  # noqa: E402
from camshaft.config.tree import leaf_fields  # noqa: E402

SECONDS = 10.0
STEPS = {"trainer.total_training_steps": 3, "trainer.save_freq": 1}
VALUES = (
    "null", "true", "-1", "0", "1", "3", "1e9", "1e400", "nan", "-inf", "''", "abc", "[]", "[1,2]", "{}", "{a: 1}",
    "${trainer.seed}", "${oc.env:HOME}", "${nothing}", "/nonexistent", "cpu", "fsdp", "grpo", "x" * 300, "\u00e9\u4e2d",
    "[[[]]]", "1_000", "0x10", "!!python/object:os.system", "module:function", "../..", "1.5", "\\", "*",
    "{a: {b: []}}",
)  # fmt: skip


@dataclass
class Failure:
    """A case that did not end as it must."""

    case: str
    reason: str
    output: str


@dataclass
class Report:
    """Results of all cases of one kind."""

    kind: str
    statuses: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        return sum(self.statuses.values())


Check = Callable[[Run], str]
"""Returns the problem of a result, or an empty string."""


# -- configs ------------------------------------------------------------------------------------------


def config_case(draw: random.Random, folder: Path) -> tuple[list[str], Check]:
    """Change a few keys of a valid config: other values, misspelt names, other syntax. `--cfg job` starts no run."""
    arguments = ppo_args(_files(), {"trainer.total_training_steps": 1})
    keys = list(leaf_fields(PPOConfig))
    for _ in range(draw.randint(1, 4)):
        key, value = draw.choice(keys), draw.choice(VALUES)
        kind = draw.random()
        if kind < 0.25:
            place = draw.randrange(len(key))
            key = key[:place] + draw.choice(["", "_", "x", ".", "[", "@", " "]) + key[place + 1 :]
        elif kind < 0.35:
            key = key.rpartition(".")[0] or key
        prefix = draw.choice(["", "", "", "+", "++", "~"])
        arguments.append(f"{prefix}{key}" if prefix == "~" else f"{prefix}{key}={value}")
    return ["ppo", *arguments, "--cfg", "job"], lambda run: "" if run.status in (0, 2) else f"status {run.status}"


@cache
def _files() -> Path:
    """Return a folder with a model and data, which no case changes."""
    folder = Path(_HOME.name)
    ppo_args(folder)
    return folder


_HOME = tempfile.TemporaryDirectory(prefix="fuzz-")


# -- checkpoints --------------------------------------------------------------------------------------


@cache
def _trained() -> tuple[Path, dict[str, torch.Tensor]]:
    """Return the folder of a run of three steps without the last checkpoint, and the weights after three steps."""
    folder = _files() / "trained"
    run = finished(Forked("sft", *sft_args(_files(), {**STEPS, "trainer.default_local_dir": folder})))
    assert run.status == 0, run.err
    weights = saved_weights(folder / "global_step_3" / "model")
    for path in (folder / "global_step_3", folder / "huggingface"):
        shutil.rmtree(path)
    (folder / LATEST).write_text("2")
    return folder, weights


def checkpoint_case(draw: random.Random, folder: Path) -> tuple[list[str], Check]:
    """Damage files of one of two checkpoints, and resume the run for one more step."""
    source, expected = _trained()
    shutil.copytree(source, folder / "run")
    step = draw.choice(["global_step_1", "global_step_2", ""])
    files = [path for path in sorted((folder / "run" / step).rglob("*")) if path.is_file() and path.name != ".lock"]
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        damage(draw, draw.choice(files))
    settings = {**STEPS, "trainer.default_local_dir": folder / "run"}

    def check(run: Run) -> str:
        if run.status:
            return "" if run.err.strip() else "an error without a message"
        weights = saved_weights(folder / "run" / "global_step_3" / "model")
        wrong = [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)]
        return f"other weights than those of an undisturbed run: {wrong[:3]}" if wrong else ""

    return ["sft", *sft_args(_files(), settings)], check


def damage(draw: random.Random, file: Path) -> None:
    """Damage a file: flip bits, truncate, zero, append, remove or replace it."""
    if not file.is_file():
        return
    data = bytearray(file.read_bytes())
    kind = draw.choice(["flip", "flip", "cut", "empty", "zeros", "append", "remove", "noise", "folder", "link", "swap"])
    if kind == "flip" and data:
        for _ in range(draw.choice([1, 1, 8])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[draw.randrange(len(data) + 1) :]
    elif kind == "empty":
        data.clear()
    elif kind == "zeros" and data:
        start = draw.randrange(len(data))
        data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    elif kind == "append":
        data += draw.randbytes(draw.choice([1, 100]))
    elif kind == "noise":
        data[:] = draw.randbytes(len(data))
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "link":
        file.symlink_to("/nonexistent")
    elif kind == "swap":
        others = [path for path in sorted(file.parent.iterdir()) if path.is_file()]
        shutil.copyfile(draw.choice(others or [Path(__file__)]), file)
    elif kind != "remove":
        file.write_bytes(data)


# -- data ---------------------------------------------------------------------------------------------


def data_case(draw: random.Random, folder: Path) -> tuple[list[str], Check]:
    """Damage the training file of a supervised run of one step."""
    file = folder / "train.parquet"
    shutil.copyfile(_files() / "data" / "sft_train.parquet", file)
    for _ in range(draw.choice([1, 2])):
        damage(draw, file)
    settings = {
        **STEPS,
        "trainer.total_training_steps": 1,
        "data.train_files": file,
        "trainer.default_local_dir": folder / "run",
    }
    return [
        "sft",
        *sft_args(_files(), settings),
    ], lambda run: "" if run.status == 0 or run.err.strip() else "no message"


CASES: dict[str, Callable[[random.Random, Path], tuple[list[str], Check]]] = {
    "configs": config_case,
    "checkpoints": checkpoint_case,
    "data": data_case,
}
"""Functions that prepare a folder, and return a command and the check of its result."""


# -- running ------------------------------------------------------------------------------------------


def run_cases(kind: str, numbers: Sequence[int], seed: int, seconds: float = SECONDS) -> Report:
    """Run the cases with these numbers, each in a fork."""
    report = Report(kind)
    for number in numbers:
        case = f"{kind}:{number}"
        with tempfile.TemporaryDirectory(prefix="fuzz-case-") as folder:
            arguments, check = CASES[kind](random.Random(f"{case} {seed}"), Path(folder))
            begin = time.monotonic()
            try:
                run = finished(Forked(*arguments), seconds)
            except subprocess.TimeoutExpired:
                report.failures.append(Failure(case, f"no end within {seconds:g} s", " ".join(arguments[-4:])))
                continue
            report.slowest = max(report.slowest, time.monotonic() - begin)
            report.statuses[run.status] += 1
            reason = check(run)
            if "Traceback" in run.err or run.status not in (0, 1, 2):
                reason = f"a traceback or status {run.status}"
            if reason:
                report.failures.append(Failure(case, reason, run.err[-1500:]))
    return report


def table(reports: Sequence[Report]) -> str:
    """Return a Markdown table."""
    head = ("kind", "cases", "status 0", "status 1", "status 2", "slowest case", "failures")
    rows: list[tuple[Any, ...]] = [
        (
            report.kind,
            report.num_cases,
            *(report.statuses[status] for status in (0, 1, 2)),
            f"{report.slowest:.1f} s",
            ", ".join(f"{failure.case} ({failure.reason})" for failure in report.failures) or "none",
        )
        for report in reports
    ]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ("---",) * len(head), *rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=2000, help="random configs (default: 2000)")
    parser.add_argument("--checkpoints", type=int, default=500, help="damaged checkpoints (default: 500)")
    parser.add_argument("--data", type=int, default=200, help="damaged data files (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of a case (default: 10)")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="run a single case")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    numbers = {
        "configs": range(options.configs),
        "checkpoints": range(options.checkpoints),
        "data": range(options.data),
    }
    if options.only:
        kind, number = options.only.split(":")
        numbers = {kind: range(int(number), int(number) + 1)}
    reports: list[Report] = []
    for kind, cases in numbers.items():
        reports.append(run_cases(kind, cases, options.seed, options.seconds))
        sys.stdout.write(table(reports[-1:]) + "\n")
        for failure in reports[-1].failures:
            sys.stdout.write(f"\n{failure.case}: {failure.reason}\n{failure.output}\n")
        sys.stdout.flush()
    if options.out is not None:
        words = (
            f"python tests/chaos/fuzz.py --configs {options.configs} --checkpoints {options.checkpoints} "
            f"--data {options.data} --seed {options.seed}"
        )
        note = f"{os.cpu_count()} CPU cores, Python {sys.version.split()[0]}, torch {torch.__version__}"
        options.out.write_text(f"# Random inputs\n\n`{words}` on {note}:\n\n{table(reports)}\n", encoding="utf-8")
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
