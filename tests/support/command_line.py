"""Run the command line as users type it, in this process, in a fork of it (fast), or in a new one (real).

    run = camshaft("ppo", *ppo_args(folder, {"trainer.seed": "abc"}))
    assert run.status == 2 and "trainer.seed" in run.err

    process = start("-m", "camshaft", "sft", *sft_args(folder))     # or Forked("sft", *sft_args(folder))
    run = finished(process)

Every wait is bounded.
"""

import contextlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch

from camshaft.cli import main
from support.ppo_runs import ppo_args

ROOT = Path(__file__).parents[2]

SMALL_SFT: dict[str, Any] = {
    "strategy": "reference",
    "data.val_files": "null",
    "data.max_length": 32,
    "data.train_batch_size": 8,
    "data.micro_batch_size_per_gpu": 4,
    "optim.lr": 1e-3,
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 6,
    "trainer.device": "cpu",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.logger": "[jsonl]",
}


SMALL_RM: dict[str, Any] = {**SMALL_SFT, "trainer.total_training_steps": 3}

SMALL_GENERATE: dict[str, Any] = {
    "data.batch_size": 4,
    "rollout.n": 2,
    "rollout.prompt_length": 16,
    "rollout.response_length": 8,
    "rollout.dtype": "float32",
    "trainer.device": "cpu",
}


@dataclass(frozen=True)
class Run:
    """Exit status and output of a finished run."""

    status: int
    out: str
    err: str


def sft_args(folder: Path, overrides: Mapping[str, Any] | None = None) -> list[str]:
    """Return the arguments of a supervised run on the model and the data that `ppo_args` writes to `folder`."""
    ppo_args(folder)
    paths = {
        "data.train_files": folder / "data" / "sft_train.parquet",
        "model.path": folder / "actor",
        "trainer.default_local_dir": folder / "sft",
    }
    return [f"{key}={value}" for key, value in {**SMALL_SFT, **paths, **(overrides or {})}.items()]


def rm_args(folder: Path, overrides: Mapping[str, Any] | None = None) -> list[str]:
    """Return the arguments of reward model training on the model and the data that `ppo_args` writes to `folder`."""
    ppo_args(folder)
    paths = {
        "data.train_files": folder / "data" / "preference_train.parquet",
        "model.path": folder / "actor",
        "trainer.default_local_dir": folder / "rm",
    }
    return [f"{key}={value}" for key, value in {**SMALL_RM, **paths, **(overrides or {})}.items()]


def generate_args(folder: Path, overrides: Mapping[str, Any] | None = None) -> list[str]:
    """Return the arguments of `camshaft generate` on the model and 16 held-out prompts of `ppo_args`."""
    ppo_args(folder)
    paths = {
        "data.path": folder / "data" / "heldout.parquet",
        "data.output_path": folder / "out.parquet",
        "model.path": folder / "actor",
    }
    return [f"{key}={value}" for key, value in {**SMALL_GENERATE, **paths, **(overrides or {})}.items()]


def camshaft(*args: str) -> Run:
    """Call the entry point of the command `camshaft` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(args))
    return Run(status, out.getvalue(), err.getvalue())


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start Python with these arguments."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_ctrl_c,
    )


class Forked:
    """A command of `camshaft` in a fork of this process, which has imported everything; like `subprocess.Popen`."""

    def __init__(self, *args: str):
        self.files = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(args,))
        self.process.start()
        self.pid = self.process.pid

    def _run(self, args: Sequence[str]) -> None:
        for number, file in enumerate(self.files, start=1):
            os.dup2(file, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The fork server and the resource tracker of the parent are not children of this process.
        forkserver._forkserver.__init__()
        resource_tracker._resource_tracker.__init__()
        torch.set_num_threads(1)  # a forked process has no OpenMP threads
        sys.exit(main(list(args)))

    def poll(self) -> int | None:
        return self.process.exitcode

    def output(self) -> str:
        """Return the standard output so far."""
        return os.pread(self.files[0], os.fstat(self.files[0]).st_size, 0).decode()

    def send_signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("camshaft", timeout or 0)
        out, err = (os.pread(file, os.fstat(file).st_size, 0).decode() for file in self.files)
        return out, err

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode


def restore_ctrl_c() -> None:
    """Restore the default handler of Ctrl-C, which background processes of a shell inherit as ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finished(process: subprocess.Popen[str] | Forked, seconds: float = 100) -> Run:
    """Wait for the process and return its result; kill it after the time limit."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode is not None
    return Run(process.returncode, out, err)
