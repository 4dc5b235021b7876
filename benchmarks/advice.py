"""Advice of the run page on real runs: none on a run that learns, and the cause of eight runs that do not.

    python benchmarks/advice.py --out benchmarks/results/advice.md

Each run trains the tiny model of the README with GRPO on 64 prompts: 16 prompts with 8 responses of 16 tokens per step.
The reward of the run that learns is the share of digits. Every other run changes one thing. The processes of two runs
are stopped and killed after 20 steps. The advice on the stopped one is that of two minutes later.

`--folder` keeps the run folders, for example to open them with `camshaft view`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from camshaft.digest import record_digests
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.tracking.run_folder import RunFolder
from camshaft.view.advice import advise

STEPS, BAD_STEPS = 40, 25
STEP_OF_SIGNAL = 20


def digits(response: str) -> float:
    return sum(char.isdigit() for char in response) / max(len(response), 1)


def zero(response: str) -> float:
    return 0.0


def fails(response: str) -> float:
    """Fail on one response in three or so."""
    if len(set(response)) % 3 == 0:
        raise ValueError("the response has no answer")
    return digits(response)


def short(response: str) -> float:
    """Score only responses that end before the limit, as if the answer came last."""
    return digits(response) if len(response) < 16 else 0.0


def different(response: str) -> float:
    """Return the share of the ten digits that occur. A policy that always writes the same has a low score."""
    return len({char for char in response if char.isdigit()}) / 10


class OtherWeights(TorchRollout):
    """A generator whose weights differ from those of the trainer, although it reports the same checksums."""

    def load_weights(self, weights: Any) -> None:
        torch.manual_seed(0)
        self.received_digests: dict[str, int] = {}
        received = record_digests(weights, self.received_digests)
        super().load_weights((name, tensor + tensor.std() * torch.randn_like(tensor)) for name, tensor in received)

    def weight_digests(self) -> Any:
        return self.received_digests


RUNS: dict[str, tuple[str | None, Callable[[str], float], dict[str, Any]]] = {
    "learns": (None, digits, {}),
    "rate too high": ("Learning rate too high", different, {"lr": 0.3}),
    "reward always 0": ("Reward is always 0", zero, {}),
    "reward raises": ("Reward function fails", fails, {}),
    "length limit": ("Responses cut at the length limit", short, {"lr": 1e-6}),
    "temperature near 0": (
        "Groups without signal",
        different,
        {"actor_rollout_ref.rollout.temperature": 0.01, "lr": 1e-8},
    ),
    "other weights": (
        "Generator differs from trainer",
        digits,
        {"actor_rollout_ref.rollout.name": "advice:OtherWeights"},
    ),
    "stopped process": ("Phase stalled", digits, {}),
    "killed process": ("Process killed", digits, {}),
}
"""Name of a run -> title of the advice, reward, and keys that differ from those of the run that learns."""


def train(name: str, folder: Path) -> None:
    """Train one of the runs in this process."""
    import camshaft
    from camshaft.models.tiny import make_tiny_model

    model = folder / "models" / "tiny"
    _, reward, keys = RUNS[name]
    camshaft.train(
        model=model if model.is_dir() else make_tiny_model(model),
        data=[{"prompt": f"Write digits. Seed: {seed}"} for seed in range(64)],
        reward=reward,
        algorithm="grpo",
        steps=STEPS if name == "learns" else BAD_STEPS,
        batch=16,
        response_length=16,
        out=folder / name.replace(" ", "_"),
        config={"lr": 3e-3, **keys},
    )


def stage(name: str, folder: Path) -> list[str]:
    """Train one of the runs in another process, and return the titles of the advice on it."""
    command = [sys.executable, __file__, "--run", name, "--folder", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    log = open(folder / f"{name.replace(' ', '_')}.log", "w", encoding="utf-8")  # noqa: SIM115
    with log, subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True) as process:
        run = None
        while process.poll() is None:
            time.sleep(0.2)
            run = run or _open(folder / name.replace(" ", "_"))
            if run is None or not name.endswith("process"):
                continue
            run.metrics.poll()
            if run.metrics.last_step >= STEP_OF_SIGNAL:
                return _after_signal(name, process, run)
    return titles(RunFolder(folder / name.replace(" ", "_")), time.time())


def _open(folder: Path) -> RunFolder | None:
    return RunFolder(folder) if folder.is_dir() else None


def _after_signal(name: str, process: subprocess.Popen[bytes], run: RunFolder) -> list[str]:
    """Stop or kill the process, and return the titles of the advice."""
    os.killpg(process.pid, signal.SIGSTOP if name == "stopped process" else signal.SIGKILL)
    try:
        time.sleep(1)
        if name == "killed process":
            process.wait()
        return titles(run, time.time() + 120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def titles(run: RunFolder, now: float) -> list[str]:
    run.metrics.poll()
    return [advice.title for advice in advise(run, now)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", choices=RUNS, help="train one of the runs in this process")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), help="stage only some runs")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.run:
        train(options.run, options.folder)
        return
    with contextlib.ExitStack() as stack:
        folder = (options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["| run | expected advice | advice |", "| --- | --- | --- |"]
        for name in options.only:
            advice = stage(name, folder)
            lines.append(f"| {name} | {RUNS[name][0] or 'none'} | {', '.join(advice) or 'none'} |")
            print(lines[-1], flush=True)
    if options.out:
        title, _, about = (__doc__ or "").partition("\n\n")
        text = [f"# {title.rstrip('.')}", about.partition("\n\n")[2].partition("\n\n`--folder`")[0]]
        how = "`python benchmarks/advice.py`"
        options.out.write_text("\n\n".join([*text, how, "\n".join(lines)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
