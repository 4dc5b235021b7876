"""Start-up time: the import, the help text, and the first optimizer step of the tiny run.

    python benchmarks/start_up.py --out benchmarks/results/start_up.md

- import: `import camshaft` in a new process.
- help: `camshaft --help`.
- first step: from the start of `examples/ppo_trainer/run_tiny_cpu.sh` until the metrics of its first step are on disk.
  This includes creating the model and the data, a validation, and a PPO step with a critic.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import machine

EXAMPLE = Path(__file__).parents[1] / "examples" / "ppo_trainer" / "run_tiny_cpu.sh"
GOALS = {"import": 2.0, "help": None, "first step": 15.0}


def command(*args: str) -> float:
    """Run a Python command and return its wall seconds."""
    start_time = time.perf_counter()
    subprocess.run([sys.executable, *args], check=True, capture_output=True)
    return time.perf_counter() - start_time


def first_step() -> float:
    """Return the seconds until the example has logged a step, and kill it."""
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    with tempfile.TemporaryDirectory() as home, open(Path(home, "log"), "w+", encoding="utf-8") as log:
        start_time = time.perf_counter()
        args = ["bash", str(EXAMPLE), f"trainer.default_local_dir={home}/run"]
        environment = os.environ | {"PATH": os.pathsep.join(paths)}
        process = subprocess.Popen(args, cwd=home, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            while not has_step(Path(home, "run", "metrics.jsonl")):
                if process.poll() is not None:
                    raise SystemExit(f"the example ended with status {process.returncode}:\n{log.read()[-2000:]}")
                time.sleep(0.01)
            return time.perf_counter() - start_time
        finally:
            os.killpg(process.pid, 9)
            process.wait()


def has_step(metrics: Path) -> bool:
    return metrics.exists() and '"actor/grad_norm"' in metrics.read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in GOALS}
    for _ in range(options.rounds + 1):
        seconds["import"].append(command("-c", "import camshaft"))
        seconds["help"].append(command("-m", "camshaft", "--help"))
        seconds["first step"].append(first_step())
    lines = ["| measurement | median seconds | maximum | goal |", "| --- | --- | --- | --- |"]
    for name, (_, *each) in seconds.items():  # the first round reads files from disk, not from the page cache
        goal = "" if GOALS[name] is None else f"under {GOALS[name]:g}"
        lines.append(f"| {name} | {statistics.median(each):.2f} | {max(each):.2f} | {goal} |")
    print("\n".join(lines))
    if options.out:
        title, _, about = (__doc__ or "").partition("\n\n")
        how = f"{machine()}; {options.rounds} rounds after a warm-up round. `python benchmarks/start_up.py`"
        text = [f"# {title.rstrip('.')}", about.partition("\n\n")[2].strip(), how, "\n".join(lines)]
        options.out.write_text("\n\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
