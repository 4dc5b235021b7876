"""Engines of other packages follow the contract and train with PPO. They have custom options and ranks per row.

The packages are `examples/engine` and `examples/pipeline_engine`, which pip installs into a temporary folder. Runs find
the engines by their entry points.
"""

import importlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import ROOT, Run, camshaft
from support.ppo_runs import ppo_args, saved_weights
from support.processes import MARK, marked, none_left_behind, start_fork_server, still_running
from support.same_run import ACTOR, MEASURED, SHUFFLED, close, names
from support.shared_folders import shared_folder

from camshaft.contracts.engine.suite import RULES
from camshaft.controller.local import PRELOAD
from camshaft.engine import base, torch_engine
from camshaft.models import packed
from camshaft.tracking.jsonl import read_metrics

pytestmark = pytest.mark.timeout(600)

EXAMPLES = (ROOT / "examples" / "engine", ROOT / "examples" / "pipeline_engine")
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

DDP: dict[str, Any] = {
    f"{ACTOR}.strategy": "ddp",
    f"+{ACTOR}.engine_kwargs.bucket_mb": 0.01,  # several buckets
    "critic.strategy": "ddp",
    "trainer.n_gpus_per_node": 2,
}

PRIVATE = re.compile(r"\b_[a-z]\w+")

Command = Callable[..., Run]


@pytest.fixture(scope="module")
def packages() -> Path:
    """Return a folder with the installed packages."""
    return shared_folder("third-party", install) / "packages"


def install(folder: Path) -> None:
    """Install the packages of the examples."""
    # setuptools writes its build folder beside the sources.
    copies = [str(shutil.copytree(example, folder / "sources" / example.name)) for example in EXAMPLES]
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "packages"), *copies]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def command(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Run `camshaft` in this process with the packages installed; no rank may outlive the test."""
    start_fork_server(*PRELOAD)
    monkeypatch.syspath_prepend(packages)
    with none_left_behind(10):
        yield camshaft
    installed = {Path(name).stem for name in os.listdir(packages)}
    for name in [name for name in sys.modules if name.partition(".")[0] in installed]:
        del sys.modules[name]


@pytest.fixture
def new_process(packages: Path, tmp_path: Path) -> Iterator[Command]:
    """Run `camshaft` in a separate process with the packages installed; no process may outlive the test."""
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
    remaining = still_running(marked(mark))
    assert not remaining, f"processes {remaining} still run"


def options(**values: float | str) -> list[str]:
    return [word for name, value in values.items() for word in ("--option", f"{name}={value}")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        pytest.param(["ddp", "--ranks", "2", *options(bucket_mb=0.01)], id="ddp"),
        pytest.param(["pipeline"], id="1_rank"),
        pytest.param(["pipeline", "--ranks", "2", *options(pipeline_size=2, pipeline_micro_batches=2)], id="2_stages"),
        pytest.param(["pipeline", "--ranks", "4", *options(pipeline_size=2)], id="2_stages_of_2_data_parallel_ranks"),
    ],
)
def test_the_engine_keeps_every_rule_of_the_contract(args: list[str], new_process: Command) -> None:
    run = new_process("check-engine", *args, seconds=500)
    assert run.status == 0, run.out + run.err
    assert f"{len(RULES)} of {len(RULES)} rules hold" in run.out


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a PPO run on one device, `run`, next to its model and data."""
    folder = tmp_path_factory.mktemp("reference")
    run = camshaft("ppo", *ppo_args(folder, PPO))
    assert run.status == 0, run.err
    return folder


@pytest.mark.parametrize(
    "engine", [pytest.param(DDP, id="ddp", marks=pytest.mark.slow), pytest.param(PIPELINE, id="pipeline")]
)
def test_ppo_with_actor_and_critic_on_two_ranks_equals_one_device(
    engine: dict[str, Any], command: Command, reference: Path, tmp_path: Path
) -> None:
    run = command("ppo", *ppo_args(tmp_path, PPO | engine))
    assert run.status == 0, run.err
    folders = {"engine": tmp_path / "run", "reference": reference / "run"}
    steps, expected = (read_metrics(folder / "metrics.jsonl") for folder in folders.values())
    assert len(steps) == len(expected) == STEPS
    for metrics, values in zip(steps, expected, strict=True):
        assert names(metrics) == names(values)
        for name, value in values.items():
            if not name.startswith(MEASURED):
                assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
        assert metrics["rollout/log_prob_diff_max"] < 1e-4
    assert {"actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"} <= steps[-1].keys()
    for role in ("actor", "critic"):
        saved, reference_folder = (folder / f"global_step_{STEPS}" / role for folder in folders.values())
        for part in ("model", "optimizer"):
            close(saved_weights(saved, part), saved_weights(reference_folder, part), 1e-5)


@pytest.mark.parametrize(
    ("engine", "option", "misspelt", "message"),
    [
        (DDP, "bucket_mb", "bucket_mbs", "'bucket_mb'? The options are bucket_mb, gradient_compression"),
        (PIPELINE, "pipeline_size", "pipelin_size", "'pipeline_size'? The options are pipeline_size, pipeline_micro"),
    ],
    ids=["ddp", "pipeline"],
)
def test_a_misspelt_option_is_rejected_with_the_nearest_name(
    engine: dict[str, Any], option: str, misspelt: str, message: str, command: Command, tmp_path: Path
) -> None:
    changes = dict(engine)
    changes[f"+{ACTOR}.engine_kwargs.{misspelt}"] = changes.pop(f"+{ACTOR}.engine_kwargs.{option}")
    run = command("ppo", *ppo_args(tmp_path, {**PPO, **changes}))
    assert run.status == 2
    assert f"{ACTOR}.engine_kwargs.{misspelt}" in run.err
    assert f"did you mean {message}" in run.err
    assert not (tmp_path / "run").exists()


def test_stages_that_do_not_divide_the_ranks_are_rejected(command: Command, tmp_path: Path) -> None:
    changes = {**PIPELINE, "+critic.engine_kwargs.pipeline_size": 3}
    run = command("ppo", *ppo_args(tmp_path, {**PPO, **changes}))
    assert run.status == 2
    assert "world_size=2 is not divisible by the model-parallel size 3" in run.err


def test_the_packages_use_no_private_name_of_camshaft() -> None:
    text = "".join(path.read_text() for example in EXAMPLES for path in sorted(example.rglob("*.py")))
    inherited = {name for module in (base, torch_engine, packed) for name in PRIVATE.findall(inspect.getsource(module))}
    assert not set(PRIVATE.findall(text)) & inherited


def test_an_unknown_strategy_lists_the_name_of_the_package(command: Command, tmp_path: Path) -> None:
    run = command("ppo", *ppo_args(tmp_path, {**PPO, f"{ACTOR}.strategy": "pipelin"}))
    assert run.status == 2
    assert "pipeline" in run.err


def test_buckets_hold_all_tensors_in_order(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(packages)
    buckets = importlib.import_module("ddp_engine").buckets
    tensors = [torch.zeros(size) for size in (2, 3, 9, 1, 1)]
    assert [[len(t) for t in bucket] for bucket in buckets(tensors, 20)] == [[2, 3], [9], [1, 1]]
    assert not list(buckets([], 20))


PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(bash|python|toml)\n(.*?)```", re.DOTALL)


def test_code_of_the_tutorial_is_that_of_the_example() -> None:
    folder = ROOT / "examples" / "engine"
    sources = {
        "python": (folder / "ddp_engine.py").read_text(encoding="utf-8"),
        "toml": (folder / "pyproject.toml").read_text(encoding="utf-8"),
    }
    excerpts = [(language, text) for language, text in BLOCK.findall(PAGE) if "camshaft.data" not in text]
    excerpts = [(language, text) for language, text in excerpts if language in sources]
    assert len(excerpts) == 6
    for language, text in excerpts:
        assert text in sources[language]
    assert f"{len(RULES)} of {len(RULES)} rules hold" in PAGE


def test_commands_of_the_tutorial_run(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for language, text in BLOCK.findall(PAGE):
        if language == "python" and "camshaft.data" in text:
            exec(text, {})
        for line in text.replace("\\\n", " ").splitlines() if language == "bash" else ():
            program, *args = shlex.split(line)
            if program == "pip":
                assert (ROOT / args[-1]) in EXAMPLES  # the fixture installs it
                continue
            if "--option" not in args and "--ranks" in args:
                args += ["--rule", "step"]  # another test checks all rules
            run = command(*args)
            broken = "--option" in args
            assert run.status == broken, f"{args}: {run.err}"
            if broken:
                verdict, detail = run.out.splitlines()[1:3]
                assert verdict.startswith("BROKEN")
                assert detail in PAGE or detail.startswith("        gradient norm of a causal_lm engine: differs")
