"""The same first task with camshaft and with TRL: lines, keys, rewards and seconds.

    python benchmarks/own_task.py --trl .venv-trl/bin/python     # after `make trl`

The two scripts in `own_task/` train the same model on the same JSON lines with GRPO (16 prompts per step, 8 responses
to each), validate, and export the model. A setting that a script omits has the default of the library. Each script is
then started again to train for 20 more steps. Lines are the lines of the formatted script without its docstring and
empty lines; keys are the arguments in calls of the library.
"""

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from camshaft import load_run
from camshaft.models.tiny import make_tiny_model

SCRIPTS = Path(__file__).parent / "own_task"
LONGER = {
    "camshaft": {"steps=40": "steps=60"},
    "trl": {"max_steps=40": "max_steps=60", ".train()": ".train(resume_from_checkpoint=True)"},
}
"""Changes of the scripts to train for 20 more steps."""
CALLS = ("train", "export", "GRPOConfig", "GRPOTrainer", "load_dataset", "save_model")


def make_task(folder: Path) -> None:
    """Write the model and the prompts, which ask for letters of one half of the alphabet."""
    make_tiny_model(folder / "models" / "tiny")
    rng = random.Random(0)
    for name, count in (("train", 256), ("val", 32)):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for _ in range(count):
                letters = rng.choice(["abcdefghijklm", "nopqrstuvwxyz"])
                text = f"Seed {rng.randrange(1000)}. Write letters from {letters[0]} to {letters[-1]}."
                row = {"prompt": [{"role": "user", "content": text}], "letters": letters}
                file.write(json.dumps(row) + "\n")


def counts(source: str) -> tuple[int, int]:
    """Return the lines of code and the keys of a script."""
    tree = ast.parse(source)
    tree.body = tree.body[1:]  # the docstring
    lines = source.splitlines()[tree.body[0].lineno - 1 :]
    keys = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            keys += (len(node.args) + len(node.keywords)) * (name in CALLS)
    return sum(bool(line.strip()) for line in lines), keys


def start(python: str, source: str, folder: Path) -> tuple[float, str]:
    """Run a script, and return its seconds and its output."""
    (folder / "task.py").write_text(source, encoding="utf-8")
    began = time.monotonic()
    done = subprocess.run([python, "task.py"], cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{python}: the start failed\n{done.stdout}\n{done.stderr}")
    return time.monotonic() - began, done.stdout


def rewards(side: str, folder: Path, output: str) -> tuple[float, float]:
    """Return the mean training rewards of the first and of the last 10 steps."""
    if side == "trl":  # prints the mean of each 10 steps
        values = [float(value) for value in re.findall(r"'reward': '?([\d.]+)", output)]
        return values[0], values[-1]
    values = load_run(folder / "runs" / "camshaft").history["critic/score/mean"][1:]  # after the first validation
    return sum(values[:10]) / 10, sum(values[-10:]) / 10


def measure(side: str, python: str) -> dict[str, str]:
    """Run both starts of a side, and return its column of the table."""
    source = (SCRIPTS / f"with_{side}.py").read_text(encoding="utf-8")
    lines, keys = counts(source)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder)
        seconds, output = start(python, source, folder)
        first, last = rewards(side, folder, output)
        longer = source
        for old, new in LONGER[side].items():
            assert longer.count(old) == 1, f"{old} is not in the script once"
            longer = longer.replace(old, new).replace(f'"models/{side}"', f'"models/{side}-60"')
        more_seconds, _ = start(python, longer, folder)
        assert (folder / "models" / f"{side}-60" / "config.json").exists()
    return {
        "lines": str(lines),
        "keys": str(keys),
        "changes for the second start": str(len(LONGER[side])),
        "reward in the first and the last 10 steps": f"{first:.2f}, {last:.2f}",
        "seconds, with start and export": f"{seconds:.0f}",
        "seconds of the second start": f"{more_seconds:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trl", default=".venv-trl/bin/python", help="Python interpreter with TRL 1.16")
    parser.add_argument("--out", type=Path, help="file to write the table to, instead of the terminal")
    args = parser.parse_args()
    columns = {
        "camshaft": measure("camshaft", sys.executable),
        "TRL 1.16": measure("trl", str(Path(args.trl).absolute())),
    }
    rows = [["", *columns], ["---"] * 3]
    rows += [[name, *(column[name] for column in columns.values())] for name in columns["camshaft"]]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    if args.out is None:
        sys.stdout.write(table)
    else:
        command = "python benchmarks/own_task.py --out benchmarks/results/own_task.md"
        args.out.write_text(f"# The same first task with camshaft and TRL\n\nGenerated by `{command}`.\n\n{table}")


if __name__ == "__main__":
    main()
