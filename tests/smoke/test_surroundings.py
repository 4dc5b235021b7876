"""Commands in unusual surroundings succeed or end with a sentence: streams, folders, locales, limits, damaged files."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command_line import Forked, finished, sft_args
from support.ppo_runs import ppo_args
from support.processes import command_line
from support.run_folders import make_run, sample_rows

from camshaft.tracking.jsonl import read_metrics
from camshaft.tracking.run_folder import RunFolder

pytestmark = pytest.mark.timeout(200)

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "camshaft")
BRACKETS = "[" * 200_000
PLAIN_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

RUN = {"trainer.total_training_steps": 2, "trainer.save_freq": -1, "trainer.logger": "[console,jsonl]"}

PYTHON_RUN = """
import sys, camshaft
assert sys.stdout is None
model, data, out = sys.argv[1:]
sizes = {"data.max_length": 32, "data.train_batch_size": 8, "data.micro_batch_size_per_gpu": 4}
places = {"strategy": "reference", "trainer.device": "cpu", "trainer.logger": ["console", "jsonl"]}
camshaft.sft(model=model, data=data, out=out, steps=2, config=sizes | places)
"""


def shell(
    script: str, *arguments: str, folder: Path = ROOT, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a shell script, in which "$@" is a command with these arguments."""
    return subprocess.run(
        ["/bin/sh", "-c", script, "sh", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (variables or {}),
        capture_output=True,
        text=True,
        timeout=100,
    )


def is_finished(run: Path) -> bool:
    """Return True if the run has ended well and its files contain nothing that was printed."""
    printed = [path.name for path in run.iterdir() if path.is_file() and b"run folder:" in path.read_bytes()]
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2]
    return RunFolder(run).state() == "finished" and printed == ["log.txt"]


@pytest.mark.parametrize(
    "closed",
    [
        ">&- 2>&- <&-",
        pytest.param(">&-", marks=pytest.mark.slow),
        pytest.param("2>&-", marks=pytest.mark.slow),
        pytest.param("<&- >&-", marks=pytest.mark.slow),
    ],
)
def test_a_run_without_standard_streams_succeeds(closed: str, tmp_path: Path) -> None:
    result = shell(f'"$@" {closed}', *COMMAND, "sft", *sft_args(tmp_path, RUN))
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    assert is_finished(tmp_path / "sft")


@pytest.mark.slow
def test_a_run_from_python_needs_no_standard_streams(tmp_path: Path) -> None:
    sft_args(tmp_path)
    paths = [tmp_path / name for name in ("actor", "data/sft_train.parquet", "sft")]
    result = shell('"$@" >&- 2>&- <&-', sys.executable, "-c", PYTHON_RUN, *map(str, paths))
    assert result.returncode == 0
    assert is_finished(tmp_path / "sft")


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["config", "show"], ["engines"], ["metrics", "explain", "actor/grad_norm"]],
    ids=" ".join,
)
def test_every_command_succeeds_without_standard_output(arguments: list[str]) -> None:
    result = shell('"$@" >&-', *COMMAND, *arguments)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_deleted_working_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    result = shell('cd gone && rmdir ../gone && "$@"', *COMMAND, "config", "show", folder=tmp_path)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert "the working directory has been deleted; change to another folder" in result.stderr


def test_a_path_that_the_locale_lacks_is_named(tmp_path: Path) -> None:
    result = shell('"$@"', *COMMAND, "view", str(tmp_path / "caf\xe9"), "--text", variables=PLAIN_LOCALE)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False), result.stderr
    assert "is not valid text in the encoding ascii; set PYTHONUTF8=1" in result.stderr


def test_a_response_that_the_locale_lacks_is_printed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3, responses={3: sample_rows(text="caf\xe9")})
    result = shell('"$@"', *COMMAND, "show", str(run), variables=PLAIN_LOCALE)
    assert (result.returncode, result.stderr) == (0, "")
    assert "caf\\xe9" in result.stdout


def test_a_limit_of_open_files_is_named(tmp_path: Path) -> None:
    result = shell('ulimit -n 12; "$@"', *COMMAND, "ppo", *ppo_args(tmp_path))
    assert (result.returncode, "Traceback" in result.stderr) == (1, False), result.stderr
    assert "Too many open files; raise the limit of open files (`ulimit -n`)" in result.stderr


@pytest.mark.parametrize(
    "name",
    [
        *(".lock", "log.txt"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("metrics.jsonl", "run.json", "config.yaml")),
    ],
)
def test_a_pipe_in_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    args = sft_args(tmp_path, RUN)
    (tmp_path / "sft").mkdir()
    path = tmp_path / "sft" / name
    os.mkfifo(path)
    run = finished(Forked("sft", *args), 60)
    assert run.status == 1
    assert f"{path} is a pipe, not a file; rename or delete it" in run.err


@pytest.mark.parametrize("name", ["run.json", "status.json", "metrics.jsonl"])
def test_a_pipe_in_a_run_folder_does_not_stop_readers(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    view = finished(Forked("view", str(tmp_path), "--text"), 60)
    assert (view.status, "Traceback" in view.err) == (0, False), view.err


@pytest.mark.parametrize("name", ["run.json", "status.json", "metrics.jsonl"])
def test_deeply_nested_json_does_not_stop_readers(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    line = f'{{"step": 4, "a": {BRACKETS}{BRACKETS.replace("[", "]")}}}\n'
    text = (run / name).read_text() if name == "metrics.jsonl" else ""
    (run / name).write_text(text + line * 5)  # a megabyte of metrics is read by another parser
    view = finished(Forked("view", str(tmp_path), "--text"), 60)
    assert (view.status, "Traceback" in view.err) == (0, False), view.err
    assert "run" in view.out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    result = finished(Forked("sft", *sft_args(folder, {**RUN, "trainer.save_freq": 2})))
    assert result.status == 0, result.err
    return folder / "sft"


@pytest.mark.parametrize(
    ("file", "exported", "message"),
    [
        ("model/manifest.json", "", "contains no intact checkpoint"),
        ("model/state.json", "global_step_2/model", "global_step_2/model is damaged: state.json cannot be read"),
        ("trainer/state.json", "global_step_2/model", "global_step_2/trainer is damaged: state.json cannot be read"),
    ],
)
def test_deeply_nested_json_is_a_damaged_checkpoint(
    file: str, exported: str, message: str, saved: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "global_step_2" / file).write_text(BRACKETS)
    result = finished(Forked("export", str(run / exported), str(tmp_path / "exported")))
    assert (result.status, "Traceback" in result.err) == (1, False), result.err
    assert message in result.err


@pytest.mark.alone
def test_a_killed_fork_server_is_named(tmp_path: Path) -> None:
    ranks = {"strategy": "fsdp", "trainer.n_gpus_per_node": 2}
    process = Forked("sft", *sft_args(tmp_path, {**RUN, **ranks}))
    os.kill(fork_server(process), signal.SIGKILL)
    run = finished(process)
    assert run.status == 1
    assert "Traceback" not in run.err
    assert "the fork server ended while it started global_pool-0, as after SIGKILL" in run.err


def fork_server(process: Forked) -> int:
    """Wait until the process has started its fork server, which then imports torch for seconds."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in map(int, children):
            if "multiprocessing.forkserver" in command_line(child):
                return child
        time.sleep(0.01)
    raise AssertionError(process.communicate()[1])
