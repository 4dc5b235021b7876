"""Fuzz configs, checkpoints, data files and model folders: no case may print a traceback, hang, or resume wrongly.

    python tests/chaos/fuzz.py                                      # 2,000 + 500 + 200 + 400 cases: 40 minutes
    python tests/chaos/fuzz.py --configs 100 --checkpoints 50 --data 20 --models 20 --seed 7
    python tests/chaos/fuzz.py --only checkpoints:137                       # one case of the seed, with its output

This process imports everything once, and each case runs in a fork. A case fails if it prints a traceback, has another
exit status than 0, 1 or 2, or takes more than ten seconds. A run that resumes from a damaged checkpoint must also end
with weights that are bitwise identical to those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
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
from pyarrow import parquet  # noqa: E402
from support.command_line import Forked, Run, finished, sft_args  # noqa: E402
from support.model_folders import BRACKETS, DAMAGES, copy_model, damaged_folder  # noqa: E402
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
    """Damage the training file of a supervised run of one step: a parquet, JSON lines, JSON or CSV file."""
    suffix = draw.choice([".parquet", ".jsonl", ".jsonl", ".json", ".csv", ".jsonl.gz", ".csv.gz"])
    file = folder / f"train{suffix}"
    file.write_bytes(_encoded_rows(suffix))
    for _ in range(draw.choice([1, 2])):
        if suffix in (".jsonl", ".json", ".csv") and draw.random() < 0.6:
            damage_text(draw, file)
        else:
            damage(draw, file)
    settings = {
        **STEPS,
        "trainer.total_training_steps": 1,
        "data.train_files": file,
        "trainer.default_local_dir": folder / "run",
    }
    return ["sft", *sft_args(_files(), settings)], has_message


@cache
def _encoded_rows(suffix: str) -> bytes:
    """Return the training file of a supervised run in another format."""
    source = _files() / "data" / "sft_train.parquet"
    rows = parquet.read_table(source).to_pylist()
    if suffix == ".parquet":
        return source.read_bytes()
    if suffix.startswith(".csv"):
        output = io.StringIO()
        writer = csv.writer(output)
        writer.writerows([["prompt", "response"], *([f"{i}+{i}=", str(2 * i)] for i in range(len(rows)))])
        text = output.getvalue().encode()
    elif suffix == ".json":
        text = json.dumps(rows).encode()
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return gzip.compress(text) if suffix.endswith(".gz") else text


TEXTS = (
    '"\\ud83d"', "[" * 150 + "]" * 150, BRACKETS, "NaN", "1e999", "1" * 5000, "null", "\ufeff", "\x00", '"', "\\",
    "{", "}",    ',"prompt":"x"', ",,,", "\r", "\n\n", "\u2028", "'", "true", "-", "[]",
)  # fmt: skip
"""Texts that are put into files."""


def damage_text(draw: random.Random, file: Path) -> None:
    """Insert a text at the start or end of a token, or in the place of one."""
    if not file.is_file():
        return
    text = file.read_bytes().decode(errors="replace")
    places = [place for place, character in enumerate(text) if character in ',:"{}[]\n'] or [0]
    start = draw.choice(places)
    end = draw.choice([start, start + 1, min(place for place in [*places, len(text)] if place >= start)])
    changed = text[:start] + draw.choice(TEXTS) + text[end:]
    file.write_bytes(changed.encode(errors="replace"))


def has_message(run: Run) -> str:
    return "" if run.status == 0 or run.err.strip() else "no message"


# -- models -------------------------------------------------------------------------------------------


def model_case(draw: random.Random, folder: Path) -> tuple[list[str], Check]:
    """Damage a model folder in a known way, change values of its JSON files, or damage a file; run one step."""
    is_known = draw.random() < 0.3
    model = damaged_folder(draw.choice(sorted(DAMAGES)), folder) if is_known else copy_model(folder)
    if draw.random() < 0.8:
        for _ in range(draw.choice([1, 1, 2, 4])):
            change_value(draw, draw.choice(sorted(model.glob("*.json"))))
    elif draw.random() < 0.5:
        damage(draw, draw.choice(sorted(model.iterdir())))
    settings = {"trainer.total_training_steps": 1, "trainer.default_local_dir": folder / "run"}
    if draw.random() < 0.5:
        return ["sft", *sft_args(_files(), {**settings, "model.path": model})], has_message
    random_init = {"actor_rollout_ref.model.random_init": True} if draw.random() < 0.2 else {}
    paths = {"actor_rollout_ref.model.path": model, "critic.model.path": model}
    return ["ppo", *ppo_args(_files(), {**settings, **paths, **random_init})], has_message


MODEL_VALUES = (
    None, True, -1, 0, 1, 3, 7, 10**6, 10**9, 10**18, 1.5, -0.5, float("nan"), float("inf"), "", "nope", "sdpa",
    "bfloat16", "../..", [], [1], ["nope"], {}, {"a": 1}, {"rope_type": "yarn"}, {"quant_method": "fp8"}, "x" * 300,
    "\u4e2d", "\ud83d",
)  # fmt: skip


MODEL_KEYS = ("quantization_config", "auto_map", "head_dim", "layer_types", "sliding_window", "pad_token_id")


def change_value(draw: random.Random, file: Path) -> None:
    """Change a value of a JSON file: replace, remove or add it, at any depth."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):  # damaged before
        return
    places = [(content, key) for key in (content if isinstance(content, dict) else ())]
    for parent, key in places:
        if isinstance(parent[key], dict) and len(parent[key]) < 50:
            places += [(parent[key], name) for name in parent[key]]
    if not places:
        return
    parent, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.1:
        del parent[key]
    elif kind < 0.2:
        parent[draw.choice(["quantization_config", "auto_map", "head_dim", "layer_types", "sliding_window"])] = (
            draw.choice(MODEL_VALUES)
        )
    else:
        parent[key] = draw.choice(MODEL_VALUES)
    file.write_text(json.dumps(content), encoding="utf-8")


CASES: dict[str, Callable[[random.Random, Path], tuple[list[str], Check]]] = {
    "configs": config_case,
    "checkpoints": checkpoint_case,
    "data": data_case,
    "models": model_case,
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
    parser.add_argument("--models", type=int, default=400, help="damaged model folders (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of a case (default: 10)")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="run a single case")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    numbers = {
        "configs": range(options.configs),
        "checkpoints": range(options.checkpoints),
        "data": range(options.data),
        "models": range(options.models),
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
            f"--data {options.data} --models {options.models} --seed {options.seed}"
        )
        note = f"{os.cpu_count()} CPU cores, Python {sys.version.split()[0]}, torch {torch.__version__}"
        options.out.write_text(f"# Random inputs\n\n`{words}` on {note}:\n\n{table(reports)}\n", encoding="utf-8")
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
