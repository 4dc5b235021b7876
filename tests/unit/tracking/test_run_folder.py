"""The reader of run folders shows complete lines, the state of a run, and its responses."""

import contextlib
import json
import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from camshaft.masking import mask_arguments
from camshaft.tracking import run_folder
from camshaft.tracking.base import RunInfo
from camshaft.tracking.jsonl import JsonlTracker
from camshaft.tracking.record import RunRecord, RunStatus
from camshaft.tracking.run_folder import Metrics, RunFolder, RunFolderError, find_runs, process_start


def write(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def test_half_a_line_appears_when_it_is_complete(tmp_path: Path) -> None:
    path, metrics = tmp_path / "metrics.jsonl", Metrics(tmp_path / "metrics.jsonl")
    write(path, '{"step": 1, "a": 0.5}\n{"step": 2, "a"')
    assert metrics.poll()
    assert metrics.series("a") == ([1], [0.5])
    write(path, ': "nan", "b": 3}\n')
    assert metrics.poll()
    assert not metrics.poll()
    assert (metrics.series("a"), metrics.series("b")) == (([1], [0.5]), ([2], [3.0]))
    assert metrics.at(2) == {"b": 3.0}
    assert math.isnan(metrics.column("b")[0])


def test_a_file_that_a_resumed_run_replaced_is_read_again(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    tracker = JsonlTracker(RunInfo("p", "e", tmp_path, total_steps=9))
    for step in (1, 2, 3):
        tracker.log({"a": step}, step)
    metrics.poll()
    resumed = JsonlTracker(RunInfo("p", "e", tmp_path, total_steps=9, resumed_step=1))
    for step in (2, 3, 4):
        resumed.log({"a": 10 * step}, step)
    metrics.poll()
    assert metrics.series("a") == ([1, 2, 3, 4], [1.0, 20.0, 30.0, 40.0])


def test_a_shorter_or_different_file_is_read_again(tmp_path: Path) -> None:
    path, metrics = tmp_path / "metrics.jsonl", Metrics(tmp_path / "metrics.jsonl")
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n')
    metrics.poll()
    path.write_text('{"step": 7, "a": 7}\n{"step": 8, "a": 8}\n')  # the same length and inode
    metrics.poll()
    assert metrics.steps == [7, 8]
    path.unlink()
    assert metrics.poll()
    assert metrics.steps == []


def test_lines_before_the_last_read_are_not_read_again(tmp_path: Path) -> None:
    path, metrics = tmp_path / "metrics.jsonl", Metrics(tmp_path / "metrics.jsonl")
    path.write_text("".join(f'{{"step": {step}, "a": 1.5}}\n' for step in range(1, 100)))
    metrics.poll()
    with open(path, "r+b") as file:
        file.write(b"#" * 50)  # a change that only a second read of the whole file would see
    write(path, '{"step": 100, "a": 1.5}\n')
    metrics.poll()
    assert metrics.steps == list(range(1, 101))


LONG = {
    "numbers": lambda step: {"a": step / 7, "b": step, "c": 1e300 if step % 2 else -5e-324},
    "missing values": lambda step: {"a": "nan" if step % 3 else 0.1 * step} | ({"late": step} if step > 700 else {}),
    "types that change": lambda step: {"a": step if step < 500 else step / 3, "flag": step % 2 == 0},
    "infinite values": lambda step: {"a": "inf" if step == 900 else "-inf" if step == 901 else 1.0 / step},
    "texts and lists": lambda step: {"a": [1] if step == 400 else step, "b": "2026-01-01", "c": "1.5"},
}


@pytest.mark.parametrize("damage", ["", "\x00\x00\n", "[1]\n", '{"a": 1}\n', "\n"])
@pytest.mark.parametrize("kind", LONG)
def test_many_lines_have_the_values_of_json(
    kind: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(run_folder, "MANY_BYTES", 1 << 12)
    lines = [json.dumps({"step": step} | LONG[kind](step)) + "\n" for step in range(1, 1001)]
    long_text = json.dumps({"step": 1001, "text": "x" * (1 << 15), "a": 2.0}) + "\n"  # longer than a block
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + damage + long_text + '{"step": 1002')
    metrics = Metrics(tmp_path / "metrics.jsonl")
    assert metrics.poll()
    expected: dict[str, tuple[list[int], list[float]]] = {}
    for values in map(json.loads, [*lines, long_text]):
        step = values.pop("step")
        for name, value in values.items():
            with contextlib.suppress(TypeError, ValueError):
                if not math.isnan(number := float(value)):
                    steps, numbers = expected.setdefault(name, ([], []))
                    steps.append(step)
                    numbers.append(number)
    assert metrics.steps == list(range(1, 1002))
    assert {name: metrics.series(name) for name in metrics.names if metrics.series(name)[0]} == expected
    assert metrics.last("a") == 2.0
    assert metrics.series("unknown") == ([], [])
    assert len(metrics.column("a")) == len(metrics.column("unknown")) == 1001
    assert "unknown" not in metrics.names


def test_the_text_of_a_long_file_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "BLOCK_BYTES", 1 << 18)
    monkeypatch.setattr(run_folder, "MANY_BYTES", 1 << 16)
    with open(tmp_path / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({"step": step} | {f"metric/{i}": step / (i + 3) for i in range(10)}) + "\n")
    metrics = Metrics(tmp_path / "metrics.jsonl")
    import pyarrow.json  # noqa: F401  (its import is not counted)

    tracemalloc.start()
    metrics.poll()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    columns = 11 * 8 * 20_000
    assert columns < peak < columns * 1.2 + 8 * (1 << 18)
    assert peak < (tmp_path / "metrics.jsonl").stat().st_size / 1.2


def test_returned_values_do_not_change_later(tmp_path: Path) -> None:
    path, metrics = tmp_path / "metrics.jsonl", Metrics(tmp_path / "metrics.jsonl")
    write(path, '{"step": 1, "a": 0.5}\n')
    metrics.poll()
    steps, values = metrics.arrays("a")
    write(path, '{"step": 2, "a": 1.5}\n')
    metrics.poll()
    assert (steps.tolist(), values.tolist()) == ([1], [0.5])
    assert metrics.series("a") == ([1, 2], [0.5, 1.5])


@pytest.mark.parametrize("line", ["", "[1]", "null", '{"a": 1}', '{"step": "x"}', '{"step": 2, "a": [1]}', "\x00\x00"])
def test_damaged_lines_are_skipped(line: str, tmp_path: Path) -> None:
    path, metrics = tmp_path / "metrics.jsonl", Metrics(tmp_path / "metrics.jsonl")
    path.write_text(f'{{"step": 1, "a": 1}}\n{line}\n{{"step": 3, "a": 3}}\n')
    metrics.poll()
    assert metrics.series("a") == ([1, 3], [1.0, 3.0])


def test_the_state_follows_the_record_of_a_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert (run.state(), run.status(), run.info(), run.sample_steps()) == ("unknown", None, {}, [])
    info = RunInfo("sums", "first", tmp_path, total_steps=5, config={"a": {"b": 1, "c": {}}}, command="sft")
    record = RunRecord(info)
    assert (run.state(), run.name, run.config()) == ("running", "first", {"a.b": 1, "a.c": {}})
    first_line, text = (tmp_path / "config.yaml").read_text().split("\n", 1)
    assert (first_line[:2], text) == ("# ", "a:\n  b: 1\n  c: {}\n")
    record.on_run_end("stopped")
    assert run.state() == "stopped"
    assert run.info()["ended"] >= run.info()["started"]


def test_a_process_that_is_gone_was_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    facts = {"status": "running", "host": os.uname().nodename, "pid": process.pid}
    facts["pid_start"] = process_start(process.pid)
    (tmp_path / "run.json").write_text(json.dumps(facts))
    run = RunFolder(tmp_path)
    assert run.state() == "running"
    process.communicate(b"\n")
    assert run.state() == "killed"


def test_a_process_with_a_reused_number_is_another(tmp_path: Path) -> None:
    facts = {"status": "running", "host": os.uname().nodename, "pid": os.getpid(), "pid_start": "1"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert RunFolder(tmp_path).state() == "killed"


@pytest.mark.parametrize(("age", "state"), [(5, "running"), (90, "killed")])
def test_a_run_elsewhere_lives_while_it_writes_its_status(age: float, state: str, tmp_path: Path) -> None:
    with RunStatus(tmp_path):
        pass
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps(status | {"at": status["at"] - age}))
    facts = {"status": "running", "host": "another", "pid": 1, "pid_start": "1"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert RunFolder(tmp_path).state() == state


def test_the_status_shows_step_and_phase(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with RunStatus(tmp_path) as status:
        status.step = 3
        status.enter("gen")
        since = status.phase.since
    shown = run.status()
    assert shown is not None
    assert (shown.step, shown.phase, shown.pid) == (3, "end", os.getpid())
    assert shown.since >= since
    (tmp_path / "status.json").write_text('{"step"')
    assert run.status() is None


@pytest.mark.parametrize("facts", ["[]", "{", '{"status": "running"}', '{"config": 3}'])
def test_a_damaged_description_is_no_error(facts: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(facts)
    run = RunFolder(tmp_path)
    assert (run.state(), run.config(), run.name) == ("unknown", {}, tmp_path.name)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = RunRecord(RunInfo("p", "e", tmp_path, total_steps=1))
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").mkdir()
    record.on_run_end("finished")
    assert "run.json cannot be written" in caplog.text


def test_arguments_are_recorded_without_secrets() -> None:
    arguments = ["camshaft", "ppo", "lr=1e-5", "custom_reward_function.reward_kwargs={api_key: hunter2, url: a}"]
    arguments.append("+custom_reward_function.reward_kwargs.hf_token=hunter2")
    masked = mask_arguments(arguments)
    assert masked[:3] == arguments[:3]
    assert "hunter2" not in " ".join(masked)
    assert "url: a" in masked[3]


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    for name in ("a/one", "a/two", "b", "b/global_step_3/x", "b/samples", "c/.hidden"):
        (tmp_path / name).mkdir(parents=True)
        if name != "b/samples":
            (tmp_path / name / "metrics.jsonl").write_text("")
    assert [run.path.relative_to(tmp_path).as_posix() for run in find_runs(tmp_path, tmp_path / "b")] == [
        *("a/one", "a/two", "b"),
    ]
    with pytest.raises(RunFolderError, match="is not a folder"):
        find_runs(tmp_path / "missing")


def test_a_missing_step_lists_the_stored_ones(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for name in ("step_4.parquet", ".step_5.parquet.unfinished", "notes.txt"):
        (tmp_path / "samples" / name).write_text("no parquet")
    run = RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match="no responses of step 5; the last stored steps are: 4"):
        run.samples(5)
    with pytest.raises(RunFolderError, match="cannot be read"):
        run.samples(4)


def test_the_reader_leaves_torch_and_pyarrow_out() -> None:
    code = "import sys, camshaft.tracking.run_folder; assert not {'torch', 'pyarrow', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
