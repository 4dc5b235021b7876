"""Measure the path from the command line to the model: run one PPO step of a tiny model on the CPU.

    python tools/step_path.py                # counts
    python tools/step_path.py --stack        # also the call stack at the model
    python tools/step_path.py --files        # also the files of the functions that the step enters, by lines entered
    python tools/step_path.py --json         # everything as JSON

`frames` counts frames of the package between the command line and the model inside the actor's update. `functions`
counts the functions of the package that the step enters in the thread of the driver, and `lines` counts their lines, so
neither changes when a function moves to another file. Further arguments are config overrides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from camshaft.cli import main as command_line  # noqa: E402
from camshaft.data import write_arithmetic  # noqa: E402
from camshaft.models.packed import PackedModel  # noqa: E402
from camshaft.models.tiny import make_tiny_model  # noqa: E402
from camshaft.trainer.ppo import PPOTrainer  # noqa: E402

PACKAGE = f"{ROOT / 'camshaft'}/"


class StepPath:
    """Records the functions that a step enters and the stack at the actor's forward pass with gradients."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.stack: list[str] = []
        self._in_step = False

    def lines(self) -> Counter[str]:
        """Return the number of lines of the functions, by file."""
        counts: Counter[str] = Counter()
        for code in self.functions:
            last = max(line for _, _, line in code.co_lines() if line is not None)
            counts[code.co_filename.removeprefix(PACKAGE)] += 1 + last - code.co_firstlineno
        return counts

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Profile this thread, and wrap `collect` and `step` of the trainer and the forward pass of the model."""
        collect, step, forward = PPOTrainer.collect, PPOTrainer.step, PackedModel.forward

        def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(trainer: PPOTrainer, *args: Any) -> Any:
                self._in_step = True
                try:
                    return method(trainer, *args)
                finally:
                    self._in_step = False

            return call

        def recorded_forward(model: PackedModel, *args: Any, **kwargs: Any) -> Any:
            if self._in_step and torch.is_grad_enabled():
                stack = list(_frames(sys._getframe(1)))[::-1]
                if any("actor" in frame for frame in stack):
                    self.stack = stack
            return forward(model, *args, **kwargs)

        PPOTrainer.collect, PPOTrainer.step = recorded(collect), recorded(step)  # pyright: ignore
        PackedModel.forward = recorded_forward  # pyright: ignore
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            PPOTrainer.collect, PPOTrainer.step, PackedModel.forward = collect, step, forward  # pyright: ignore

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = event == "call" and not code.co_name.startswith("<")
        if self._in_step and is_function and code.co_filename.startswith(PACKAGE):
            self.functions.add(code)


def _frames(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            yield f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"
        frame = frame.f_back


def measure(folder: Path, overrides: Sequence[str] = ()) -> StepPath:
    """Run one step with its model, data and outputs in `folder`."""
    make_tiny_model(folder / "model")
    write_arithmetic(folder / "sums", num_train=64, num_heldout=8)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    keys = {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "data.train_files": folder / "sums" / "train.parquet",
        "data.val_files": folder / "sums" / "heldout.parquet",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "actor_rollout_ref.model.path": folder / "model",
        f"{actor}.strategy": "reference",
        f"{actor}.ppo_mini_batch_size": 8,
        f"{actor}.ppo_micro_batch_size_per_gpu": 8,
        f"{rollout}.name": "torch",
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 32,
        f"{rollout}.tensor_model_parallel_size": 1,
        "critic.model.path": folder / "model",
        "critic.ppo_micro_batch_size_per_gpu": 32,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": folder / "run",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.total_training_steps": 1,
    }
    path = StepPath()
    with path.recording():
        status = command_line(["ppo", *(f"{key}={value}" for key, value in keys.items()), *overrides])
    if status:
        raise RuntimeError(f"the run ended with exit status {status}")
    return path


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description="Measure the path from the command line to the model.")
    for option in ("--stack", "--files", "--json"):
        parser.add_argument(option, action="store_true")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        path = measure(Path(folder), overrides)
    lines = path.lines()
    if options.json:
        facts = {"stack": path.stack, "functions": len(path.functions), "lines": lines}
        sys.stdout.write(json.dumps(facts) + "\n")
        return
    text = [f"{len(path.stack)} frames, {len(path.functions)} functions with {lines.total()} lines"]
    text += path.stack if options.stack else []
    text += [f"{lines[file]:4} {file}" for file in sorted(lines, key=lambda file: (-lines[file], file))] * options.files
    sys.stdout.write("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
