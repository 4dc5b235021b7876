"""A run that ends because memory ran out shows its forecast, its peak, and the change with which it fits."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from support import even_digits
from support.command_line import ROOT
from support.forked_python import fork_python

import camshaft
from benchmarks.plan import run_arguments, write_inputs
from camshaft.config import PPOConfig, compose
from camshaft.errors import WorkerError
from camshaft.models.tiny import make_tiny_model
from camshaft.planning import memory_error, plan_process
from camshaft.planning.memory_error import explain_memory_errors, is_out_of_memory, phase_of
from camshaft.planning.plan_process import PlanUnavailable
from camshaft.subprocesses import describe_exit

MIB = 1 << 20
SECONDS = 240
"""Time limit of a run."""
MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
LOG_PROB_MICRO_BATCH = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"


def error_of(size: int) -> BaseException:
    """Return the error of an allocation on the CPU."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(size, dtype=torch.uint8)
    return caught.value


def test_errors_of_torch_and_python_are_recognized() -> None:
    assert is_out_of_memory(error_of(1 << 60))
    with pytest.raises(MemoryError) as caught:
        bytearray(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_the_cause_of_an_error_is_recognized() -> None:
    error = WorkerError("actor.update_actor raised on rank 0 of 2: RuntimeError: x")
    assert not is_out_of_memory(error)
    error.__cause__ = error_of(1 << 60)
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    ("message", "phase"),
    [
        ("actor.update_actor raised on rank 1 of 2: MemoryError", "update_actor"),
        ("rank 0 of 2 of critic (process 7) died in compute_values (SIGKILL, which the kernel sends ...)", "values"),
        ("actor_rollout_ref.publish raised on rank 0 of 1: MemoryError", "sync"),
        ("actor_rollout_ref.portable_snapshot raised on rank 0 of 1: MemoryError", "sync"),
        ("rollout.receive_weights raised on rank 0 of 1: MemoryError", "gen"),
        ("rank 0 of 2 of critic (process 7) died in seat_for (SIGKILL)", None),
    ],
)
def test_the_message_of_a_rank_names_the_phase(message: str, phase: str | None) -> None:
    assert phase_of(WorkerError(message)) == phase


def test_the_stack_names_the_phase_of_a_run_in_one_process() -> None:
    def compute_log_prob() -> None:
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        compute_log_prob()
    assert phase_of(caught.value) == "old_log_prob"


def test_a_run_from_python_shows_its_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_process, "start_python", fork_python)

    def allocate(*_: Any) -> None:
        bytearray(1 << 60)

    with pytest.raises(MemoryError) as caught:
        camshaft.train(
            model=make_tiny_model(tmp_path / "model"),
            data=[{"prompt": str(number)} for number in range(8)],
            reward=lambda response: len(response),
            algorithm="grpo",
            batch=8,
            response_length=8,
            steps=1,
            device="cpu",
            on_step=allocate,
            out=str(tmp_path / "run"),
        )
    report = "\n".join(caught.value.__notes__)
    assert re.search(r"forecast [\d.,]+ MiB of tensors, peak of a rank [\d.,]+ MiB", report), report
    assert re.search(r"run: camshaft plan .*data.train_batch_size=8", report), report


def killed_rank() -> WorkerError:
    """Return the error of the controller for a rank that SIGKILL has ended."""
    return WorkerError(f"rank 1 of 2 of actor (process 7) died in update_actor ({describe_exit(-signal.SIGKILL)})")


@pytest.mark.parametrize("kills", ["oom_kill 3\n", "oom_kill 4\n", ""])
def test_a_killed_rank_has_a_forecast_unless_the_kernel_killed_nothing(
    kills: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text(kills and "nr_free_pages 9\noom_kill 3\n", encoding="ascii")
    monkeypatch.setattr(memory_error, "KERNEL_COUNTERS", counters)
    monkeypatch.setattr(memory_error, "plan_in_process", Mock(side_effect=PlanUnavailable("not supported")))
    write_inputs(tmp_path, hidden=16, layers=1)
    (config,) = compose(run_arguments(tmp_path, "fsdp", ranks=2), PPOConfig)

    def train() -> None:
        with explain_memory_errors(config, []):
            counters.write_text(kills, encoding="ascii")
            raise killed_rank()

    with pytest.raises(WorkerError) as caught:
        train()
    notes = getattr(caught.value, "__notes__", [])
    assert [note.partition(" out ")[0] for note in notes] == (
        [] if kills == "oom_kill 3\n" else ["Memory may have run"]
    )


# -- real runs with a limit of their memory ---------------------------------------------------------

PROGRAM = """
import resource, sys
if int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_AS)[1]))
from camshaft.cli import main
if __name__ == "__main__":
    sys.exit(main(["ppo", *sys.argv[2:]]))
"""


class Limited(NamedTuple):
    """A finished run."""

    status: int
    err: str
    addresses: int
    """Maximum of the address spaces of its processes, in bytes."""


def arguments(folder: Path, strategy: str, ranks: int, micro_batch: int) -> list[str]:
    """Return the arguments of a run whose activations need most of its memory."""
    return [
        f"model={folder / 'model'}",
        f"data={folder / 'train.jsonl'}",
        "val_data=null",
        f"reward={even_digits.__file__}",
        "algorithm=grpo",
        f"engine={strategy}",
        "rollout=torch",
        "device=cpu",
        f"devices={ranks}",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        f"{MICRO_BATCH}={micro_batch}",
        "data.max_prompt_length=16",
        "data.max_response_length=160",
        "custom_reward_function.num_workers=1",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / uuid.uuid4().hex}",
    ]


def run_with_limit(limit: int, run: list[str]) -> Limited:
    """Run with an address space of `limit` bytes per process, or without a limit (0)."""
    mark = f"CAMSHAFT_TEST={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "PYTHONPATH": str(ROOT), name: value}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(limit), *run],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    addresses, deadline = 0, time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        addresses = max(addresses, *(address_space(pid) for pid in marked_processes(mark)))
        time.sleep(0.05)
    process.kill()
    _, err = process.communicate(timeout=60)
    return Limited(process.returncode, err, addresses)


def marked_processes(mark: str) -> list[Path]:
    """Return the folders in /proc of the processes with this environment variable."""
    folders = [Path(f"/proc/{pid}") for pid in os.listdir("/proc") if pid.isdigit()]
    return [folder for folder in folders if mark.encode() in read(folder / "environ").split(b"\0")] or [Path()]


def address_space(folder: Path) -> int:
    lines = read(folder / "status").decode().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak:")), 0)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.timeout(5 * SECONDS)
@pytest.mark.parametrize(("strategy", "ranks"), [("reference", 1), ("fsdp", 2)])
def test_a_run_that_dies_of_memory_finishes_with_the_proposed_change(strategy: str, ranks: int, tmp_path: Path) -> None:
    write_inputs(tmp_path, hidden=256, layers=6, intermediate_size=4096)
    micro_batch = 32 // ranks
    small = run_with_limit(0, arguments(tmp_path, strategy, ranks, 1))
    large = run_with_limit(0, arguments(tmp_path, strategy, ranks, micro_batch))
    assert (small.status, large.status) == (0, 0), small.err + large.err
    limit = (small.addresses + large.addresses) // 2
    assert large.addresses - small.addresses > 200 * MIB, "activations do not dominate"

    dead = run_with_limit(limit, arguments(tmp_path, strategy, ranks, micro_batch))
    assert dead.status != 0
    report = dead.err.rpartition("Memory ran out in update_actor:")[2]
    sizes = re.search(r"update_actor of actor: forecast [\d.,]+ MiB of tensors, peak of a rank [\d.,]+", report)
    assert sizes is not None, dead.err[-3000:]
    assert "camshaft plan --memory" in report
    change = re.search(r"It fits with (.*)\.", report)
    assert change is not None, report

    alive = run_with_limit(limit, [*arguments(tmp_path, strategy, ranks, micro_batch), *change[1].split()])
    assert alive.status == 0, alive.err[-3000:]
