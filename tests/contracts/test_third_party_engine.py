"""An engine of another package follows the contract and trains with PPO. It has custom options and ranks per row.

The package is `examples/pipeline_engine`, installed into a temporary folder and found by its entry point.
"""

import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import ROOT, Run, camshaft
from support.ppo_runs import ppo_args, saved_weights
from support.processes import MARK, marked, none_left_behind, start_fork_server, still_running
from support.same_run import ACTOR, MEASURED, SHUFFLED, close

from camshaft.contracts.engine.suite import RULES
from camshaft.controller.local import PRELOAD
from camshaft.engine import base, torch_engine
from camshaft.models import packed
from camshaft.tracking.jsonl import read_metrics

pytestmark = pytest.mark.timeout(600)

EXAMPLE = ROOT / "examples" / "pipeline_engine"
STEPS = 2
PPO: dict[str, Any] = {
    **SHUFFLED,
    "trainer.total_training_steps": STEPS,
    "trainer.total_epochs": STEPS,
    "trainer.save_freq": STEPS,
    "trainer.logger": "[jsonl]",
}
PIPELINE: dict[str, Any] = {
    f"{ACTOR}.strategy": "pipeline",
    f"+{ACTOR}.engine_kwargs.pipeline_size": 2,
    f"+{ACTOR}.engine_kwargs.pipeline_micro_batches": 2,
    "critic.strategy": "pipeline",
    "+critic.engine_kwargs.pipeline_size": 2,
    "trainer.n_gpus_per_node": 2,
}

PRIVATE = re.compile(r"\b_[a-z]\w+")

Command = Callable[..., Run]


def install(folder: Path) -> None:
    """Install the package as pip does, without building a wheel: its modules and their metadata."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    for package in project["tool"]["setuptools"]["packages"]:
        shutil.copytree(EXAMPLE / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    name, version = project["project"]["name"], project["project"]["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in project["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{point} = {target}" for point, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the installed package."""
    folder = tmp_path_factory.mktemp("packages")
    install(folder)
    return folder


@pytest.fixture
def command(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Run `camshaft` in this process with the package installed; no rank may outlive the test."""
    start_fork_server(*PRELOAD)
    monkeypatch.syspath_prepend(packages)
    with none_left_behind(10):
        yield camshaft
    for name in [name for name in sys.modules if name.partition(".")[0] in os.listdir(packages)]:
        del sys.modules[name]


@pytest.fixture
def new_process(packages: Path, tmp_path: Path) -> Iterator[Command]:
    """Run `camshaft` in a separate process with the package installed; no process may outlive the test."""
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(ROOT), str(packages)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: mark}

    def run(*args: str, seconds: float = 300) -> Run:
        result = subprocess.run(
            [sys.executable, "-m", "camshaft", *args],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
        return Run(result.returncode, result.stdout, result.stderr)

    yield run
    remaining = still_running(marked(mark), 10)
    assert not remaining, f"processes {remaining} still run"


def options(**values: int) -> list[str]:
    return [word for name, value in values.items() for word in ("--option", f"{name}={value}")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        pytest.param([], id="1_rank"),
        pytest.param(["--ranks", "2", *options(pipeline_size=2, pipeline_micro_batches=2)], id="2_stages"),
        pytest.param(["--ranks", "4", *options(pipeline_size=2)], id="2_stages_of_2_data_parallel_ranks"),
    ],
)
def test_the_engine_keeps_every_rule_of_the_contract(args: list[str], new_process: Command) -> None:
    run = new_process("check-engine", "pipeline", *args, seconds=500)
    assert run.status == 0, run.out + run.err
    assert f"{len(RULES)} of {len(RULES)} rules hold" in run.out


def test_ppo_with_actor_and_critic_on_two_stages_equals_one_device(command: Command, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("pipeline", "reference")}
    overrides = {name: {"trainer.default_local_dir": folder} for name, folder in folders.items()}
    run = command("ppo", *ppo_args(tmp_path, PPO | PIPELINE | overrides["pipeline"]))
    assert run.status == 0, run.err
    reference = camshaft("ppo", *ppo_args(tmp_path, PPO | overrides["reference"]))
    assert reference.status == 0, reference.err
    steps, expected = (read_metrics(folder / "metrics.jsonl") for folder in folders.values())
    assert len(steps) == len(expected) == STEPS
    for metrics, values in zip(steps, expected, strict=True):
        assert metrics.keys() == values.keys()
        for name, value in values.items():
            if not name.startswith(MEASURED):
                assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
        assert metrics["rollout/log_prob_diff_max"] < 1e-4
    assert {"actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"} <= steps[-1].keys()
    for role in ("actor", "critic"):
        saved, reference_folder = (folder / f"global_step_{STEPS}" / role for folder in folders.values())
        for part in ("model", "optimizer"):
            close(saved_weights(saved, part), saved_weights(reference_folder, part), 1e-5)


def test_a_misspelt_option_is_rejected_with_the_nearest_name(command: Command, tmp_path: Path) -> None:
    changes = {**PIPELINE, f"+{ACTOR}.engine_kwargs.pipelin_size": 2}
    del changes[f"+{ACTOR}.engine_kwargs.pipeline_size"]
    run = command("ppo", *ppo_args(tmp_path, {**PPO, **changes}))
    assert run.status == 2
    assert f"{ACTOR}.engine_kwargs.pipelin_size" in run.err
    assert "did you mean 'pipeline_size'? The options are pipeline_size, pipeline_micro_batches" in run.err
    assert not (tmp_path / "run").exists()


def test_stages_that_do_not_divide_the_ranks_are_rejected(command: Command, tmp_path: Path) -> None:
    changes = {**PIPELINE, "+critic.engine_kwargs.pipeline_size": 3}
    run = command("ppo", *ppo_args(tmp_path, {**PPO, **changes}))
    assert run.status == 2
    assert "world_size=2 is not divisible by the model-parallel size 3" in run.err


def test_the_package_uses_no_private_name_of_camshaft() -> None:
    text = "".join(path.read_text() for path in sorted(EXAMPLE.rglob("*.py")))
    inherited = {name for module in (base, torch_engine, packed) for name in PRIVATE.findall(inspect.getsource(module))}
    assert not set(PRIVATE.findall(text)) & inherited


def test_an_unknown_strategy_lists_the_name_of_the_package(command: Command, tmp_path: Path) -> None:
    run = command("ppo", *ppo_args(tmp_path, {**PPO, f"{ACTOR}.strategy": "pipelin"}))
    assert run.status == 2
    assert "pipeline" in run.err
