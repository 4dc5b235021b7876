"""Kill random processes of runs at random moments until the runs end, and compare them with undisturbed runs.

    python tests/chaos/chaos.py                                  # 20 kills for each layout: about an hour
    python tests/chaos/chaos.py --kills 4 --layouts local,ray --out benchmarks/results/chaos.md

A kill is SIGKILL to the driver, a rank, a rank of the rollout's own pool, the generator's process or a reward worker,
whichever was killed least often, while the run starts, computes or saves. A run that ends because of it is restarted
with the same command. The script fails if the metrics or the last weights are not bitwise identical, if a process,
shared memory or a temporary file is left, or if an exit takes too long.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from support.ppo_runs import ppo_args, saved_weights  # noqa: E402
from support.processes import MARK, command_line, marked, still_running  # noqa: E402
from support.same_run import RANKS  # noqa: E402

from camshaft.tracking import deterministic  # noqa: E402
from camshaft.tracking.jsonl import read_metrics  # noqa: E402

ASYNC: dict[str, Any] = {
    "async_training.max_staleness": 2,
    "algorithm.rollout_correction.rollout_is": "token",
    "actor_rollout_ref.rollout.n": 2,
}
RAY = {**RANKS, "trainer.controller": "ray", "ray_kwargs.ray_init": "{include_dashboard: false, num_cpus: 2}"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "local": {},
    "fsdp": RANKS,
    "process": {"actor_rollout_ref.rollout.name": "process"},
    "ray": RAY,
    "async": {**ASYNC, **RANKS, "+trainer.resource_pools.rollout.n_gpus_per_node": 2},
}
SETTINGS: dict[str, Any] = {
    "data.shuffle": True,
    "data.train_max_samples": 24,
    "trainer.total_epochs": 1000,
    "trainer.test_freq": 5,
    "trainer.save_freq": 1,
    "trainer.max_actor_ckpt_to_keep": 2,
    "trainer.max_critic_ckpt_to_keep": 2,
    "trainer.logger": "[jsonl]",
    "trainer.resume_mode": "auto",
    "custom_reward_function.num_workers": 2,
}
REPLACED = ("reward worker", "rollout")
"""Kinds of processes that the driver replaces if they die."""
EXIT_SECONDS = 60.0
"""Time limit for a run to end after a kill, on a busy machine."""
LEFT_SECONDS = 30.0
"""Time limit for all other processes of a run to end after its driver."""
FILE_SECONDS = 15.0
"""Time limit for the files of stacks, which are deleted ten seconds after a rank on Ray has ended."""
START_SECONDS = 240.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Report:
    """Result of one layout."""

    layout: str
    kills: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    steps: int = 0
    slowest_exit: float = 0.0
    """Longest time between a kill and the end of all processes, in seconds."""
    problems: list[str] = field(default_factory=list)


def command(folder: Path, layout: str, steps: int, run: Path) -> list[str]:
    settings = {**SETTINGS, **LAYOUTS[layout], "trainer.total_training_steps": steps, "trainer.default_local_dir": run}
    return [sys.executable, "-m", "camshaft", "ppo", *ppo_args(folder, settings)]


@contextmanager
def started(
    arguments: Sequence[str], mark: str, temporary: Path, log: Path, python_path: Sequence[Path] = (ROOT,)
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run whose processes have `mark`, a unique text, in their environment. Kill them at the end."""
    assert len(mark) == len(uuid.uuid4().hex), mark  # a short text would select processes of other programs
    variables = {MARK: mark, "TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary), "RAY_USAGE_STATS_ENABLED": "0"}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, python_path))
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        for pid in marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def victims(driver: int, mark: str) -> dict[str, list[int]]:
    """Return the running processes of a run by kind."""
    kinds: dict[str, list[int]] = {"driver": [driver]}
    commands = {pid: _read(f"/proc/{pid}/cmdline").replace("\0", " ") for pid in marked(mark)}
    servers = [pid for pid, text in commands.items() if "multiprocessing.forkserver" in text]
    for pid, text in commands.items():
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        parent = int(fields[1]) if len(fields) > 1 else 0
        if "camshaft.rewards.worker" in text:
            kinds.setdefault("reward worker", []).append(pid)
        elif "camshaft.rollout.process.child" in text:
            kinds.setdefault("generator", []).append(pid)
        elif (pid in servers and parent in servers) or text.startswith("ray::ActorExecutor"):
            kinds.setdefault("rollout" if _log(pid).startswith("rollout_rank") else "rank", []).append(pid)
    return kinds


def _log(pid: int) -> str:
    """Return the name of the file to which a process writes its output."""
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).name
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def logged(run: Path) -> int:
    file = run / "metrics.jsonl"
    return max((int(line["step"]) for line in read_metrics(file)), default=0) if file.exists() else 0


def wait_for_moment(process: subprocess.Popen[bytes], run: Path, draw: random.Random) -> None:
    """Wait until a random moment of the start (a quarter of all cases), of the next steps, or of their saves."""
    deadline = time.monotonic() + START_SECONDS
    if draw.random() < 0.25:
        time.sleep(draw.uniform(0.0, 8.0))
        return
    step, saves = logged(run) + draw.randint(1, 2), draw.random() < 0.5
    while process.poll() is None and time.monotonic() < deadline:
        if list(run.glob(f"global_step_{step}/*.unfinished")) if saves else logged(run) >= step:
            break
        time.sleep(0.005)
    time.sleep(draw.uniform(0.0, 0.05 if saves else 0.5))


def kill_and_restart(layout: str, kills: int, folder: Path, seed: int) -> Report:
    """Run one layout to its end with this number of kills, and once without any, and compare the two."""
    draw, report = random.Random(f"{layout} {seed}"), Report(layout, steps=3 * kills + 4)
    memory_before = set(os.listdir(SHARED_MEMORY))
    run, undisturbed = folder / f"{layout}-killed", folder / f"{layout}-undisturbed"
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as temporary:
        while not report.problems:
            mark, log = uuid.uuid4().hex, folder / f"{layout}-{report.starts}.log"
            report.starts += 1
            with started(command(folder, layout, report.steps, run), mark, Path(temporary), log) as process:
                while process.poll() is None and sum(report.kills.values()) < kills:
                    wait_for_moment(process, run, draw)
                    candidates = victims(process.pid, mark)
                    kind = min(sorted(candidates), key=lambda kind: (report.kills[kind], draw.random()))
                    if process.poll() is not None:
                        break
                    kill(draw.choice(candidates[kind]))
                    report.kills[kind] += 1
                    if kind not in REPLACED:
                        report.problems += check_exit(process, kind, log, mark, report)
                        break
                else:
                    report.problems += check_end(process, log, mark)
                    if logged(run) == report.steps:
                        break
        mark = uuid.uuid4().hex
        with started(command(folder, layout, report.steps, undisturbed), mark, Path(temporary), log) as process:
            report.problems += check_end(process, log, mark)
        report.problems += [f"temporary file {path.name}" for path in left_files(Path(temporary), FILE_SECONDS)]
    names = set(os.listdir(SHARED_MEMORY)) - memory_before - {f".camshaft-tmp-{os.geteuid()}"}
    # Other programs that use `multiprocessing` create semaphores there. Runs create none.
    report.problems += [f"/dev/shm/{name}" for name in sorted(names) if not name.startswith("sem.mp-")]
    return replace(report, problems=report.problems or differences(run, undisturbed, report.steps))


def left_files(folder: Path, seconds: float) -> list[Path]:
    """Return the temporary files of camshaft that are in the folder for longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while (paths := sorted(folder.glob(".camshaft-tmp-*/*"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return paths


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def check_exit(process: subprocess.Popen[bytes], kind: str, log: Path, mark: str, report: Report) -> list[str]:
    """Wait until all processes of the run have ended after a kill."""
    begin = time.monotonic()
    try:
        process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"the run did not end within {EXIT_SECONDS:g} s after the {kind} was killed"]
    problems = remaining(mark)
    report.slowest_exit = max(report.slowest_exit, time.monotonic() - begin)
    if process.returncode == 0:
        problems.append(f"the run ended with status 0 after the {kind} was killed")
    if "Traceback" in log.read_text(errors="replace"):
        problems.append(f"a traceback after the {kind} was killed: {error_in(log)}")
    return problems


def error_in(log: Path) -> str:
    """Return the error of a run: its output from the last message of camshaft on."""
    text = log.read_text(errors="replace")
    return text[max(0, text.rfind("\ncamshaft: ")) :][:3000]


def check_end(process: subprocess.Popen[bytes], log: Path, mark: str) -> list[str]:
    """Wait until the run has reached its end and all of its processes have ended."""
    try:
        status = process.wait(1200)
    except subprocess.TimeoutExpired:
        return ["the run did not reach its end within 1200 s"]
    if status != 0:
        return [f"the run ended with status {status}: {error_in(log)}"]
    return remaining(mark)


def remaining(mark: str) -> list[str]:
    """Wait until all processes of a run have ended. On Ray, the last ones delete files ten seconds after a rank."""
    left = still_running(marked(mark), LEFT_SECONDS)
    names = ", ".join(command_line(pid)[:60].strip() or str(pid) for pid in left)
    return [f"{len(left)} processes outlive the run by {LEFT_SECONDS:g} s: {names}"] if left else []


def differences(run: Path, undisturbed: Path, steps: int) -> list[str]:
    """Return the differences between the metrics of all steps and between the weights of the last step."""
    problems = []
    actual, expected = (
        [deterministic(line) for line in read_metrics(path / "metrics.jsonl")] for path in (run, undisturbed)
    )
    if [line["step"] for line in actual] != list(range(1, steps + 1)):
        problems.append(f"the steps in metrics.jsonl are {[line['step'] for line in actual]}")
    problems += [f"metrics of step {line['step']}" for line, other in zip(actual, expected) if line != other]  # noqa: B905
    for role in ("actor", "critic"):
        for part in ("model", "optimizer"):
            tensors, others = (saved_weights(path / f"global_step_{steps}" / role, part) for path in (run, undisturbed))
            names = [name for name in tensors.keys() | others.keys() if not _equal(tensors, others, name)]
            problems += [f"{role}/{part}: {name}" for name in names]
    return problems


def _equal(tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor], name: str) -> bool:
    return name in tensors and name in others and torch.equal(tensors[name], others[name])


def table(reports: Sequence[Report]) -> str:
    kinds = ("driver", "rank", "rollout", "generator", "reward worker")
    head = (
        "layout",
        "steps",
        "starts",
        *(f"kills of {kind}" for kind in kinds),
        "slowest exit",
        "differences and leftovers",
    )
    rows = [
        (
            report.layout, str(report.steps), str(report.starts), *(str(report.kills[kind]) for kind in kinds),
            f"{report.slowest_exit:.1f} s", "; ".join(report.problems) or "none",
        )
        for report in reports
    ]  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills in each layout (default: 20)")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="layouts, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and of the processes to kill")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    reports = []
    with tempfile.TemporaryDirectory(prefix="chaos-runs-") as folder:
        for layout in options.layouts.split(","):
            reports.append(kill_and_restart(layout, options.kills, Path(folder), options.seed))
            sys.stdout.write(table(reports) + "\n\n")
            sys.stdout.flush()
    if options.out is not None:
        words = f"python tests/chaos/chaos.py --kills {options.kills} --layouts {options.layouts} --seed {options.seed}"
        note = f"{os.cpu_count()} CPU cores, Python {sys.version.split()[0]}, torch {torch.__version__}"
        options.out.write_text(f"# Random kills\n\n`{words}` on {note}:\n\n{table(reports)}\n", encoding="utf-8")
    return 1 if any(report.problems for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
