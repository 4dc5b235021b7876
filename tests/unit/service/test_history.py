"""Run folders of served models: a line for each step, its times, and the commands that read it."""

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import camshaft
from support.served_fork import ServedFork
from support.tinker_clients import ClientModel, RunningServer, datum, read_output, running_server

from camshaft.roles.served import ServedWorker
from camshaft.service import history, times
from camshaft.service.times import SessionTimes
from camshaft.tracking.jsonl import read_metrics
from camshaft.tracking.names import METRICS, find

DATA = [datum([5, 6, 7, 8, 9]), datum([10, 12, 14], weights=[0.5, -2.0])]
OTHER = [datum([20, 21, 22, 23])]


def folder_of(root: Path, model: ClientModel) -> Path:
    session, _, number = model.identifier.partition(":train:")
    return root / session / number


def train(model: ClientModel, number: int, **adam: float) -> float:
    """Train a step of two calls, the commands `number` to `number` + 2. Return its loss."""
    losses = [read_output(model.wait(model.train(number + i, data)))[1] for i, data in enumerate((DATA, OTHER))]
    model.wait(model.step(number + 2, **adam))
    return sum(losses)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path, worker=ServedWorker) as server:
        yield server


def test_each_step_has_a_line_with_what_the_client_saw(server: RunningServer) -> None:
    model = server.client().create_model()
    expected = []
    for step in range(3):
        losses = [
            read_output(model.wait(model.train(4 * step + 1 + i, data)))[1] for i, data in enumerate((DATA, OTHER))
        ]
        model.log_probs(4 * step + 3, DATA)  # which adds no gradient
        norm = model.wait(model.step(4 * step + 4, learning_rate=0.01 * step))["metrics"]["grad_norm"]
        expected.append((sum(losses), norm, 0.01 * step))
        time.sleep(0.2)
    folder = folder_of(Path(server.config.folder), model)
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["train/command"] for line in lines] == [4, 8, 12]
    for line, (loss, norm, rate) in zip(lines, expected, strict=True):
        assert (line["train/loss"], line["train/grad_norm"], line["train/lr"]) == (pytest.approx(loss), norm, rate)
        assert line["train/loss_per_token"] == pytest.approx(loss / 9)
        assert [line[f"train/{name}"] for name in ("calls", "rows", "tokens")] == [2, 3, 9]
        parts = [line[f"timing_s/{part}"] for part in ("train", "sample", "queue", "client")]
        assert sum(parts) == pytest.approx(line["timing_s/step"], rel=1e-6)
        assert line["timing_s/train"] > 0
    assert all(line["timing_s/client"] > 0.2 for line in lines[1:])
    record = json.loads((folder / "run.json").read_text())
    assert (record["status"], record["command"], record["experiment"]) == ("running", "serve", model.identifier)
    server.finish()
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_logged_metrics_are_those_of_the_table(server: RunningServer) -> None:
    model = server.client().create_model()
    train(model, 1)
    (line,) = read_metrics(folder_of(Path(server.config.folder), model) / "metrics.jsonl")
    logged = set(line) - {"step"}
    for name in logged:
        find(name, "serve")
    assert {name for metric in METRICS if metric.trainer == "serve" for name in metric.names()} == logged


def test_failed_steps_have_no_line_and_leave_nothing_to_the_next(server: RunningServer) -> None:
    model = server.client().create_model()
    model.train(1, OTHER)
    model.train(2, [datum([5, 999])])
    promise = model.step(3)
    assert (
        b"changed no weight"
        in model.client.request("retrieve_future", json.dumps({"request_id": promise["request_id"]}).encode())[1]
    )
    loss = read_output(model.wait(model.train(4, DATA)))[1]
    model.wait(model.step(5))
    (line,) = read_metrics(folder_of(Path(server.config.folder), model) / "metrics.jsonl")
    assert (line["step"], line["train/command"], line["train/loss"]) == (1, 5, pytest.approx(loss))


def test_the_log_says_what_the_server_has_waited_for(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "REPORT_SECONDS", 0.0)
    model = server.client().create_model()
    train(model, 1)
    with caplog.at_level(logging.INFO, history.__name__):
        time.sleep(1.0)
        train(model, 4)
    (message,) = [record.getMessage() for record in caplog.records if record.name == history.__name__]
    assert message.startswith(f"{model.identifier}  step 2  loss ")
    share = int(message.partition(" % for the client")[0].rpartition(" ")[2])
    assert 50 < share < 100


def test_lines_continue_after_a_kill(tmp_path: Path) -> None:
    with ServedFork(tmp_path, save_every=2) as server:
        model = server.client().create_model()
        losses = [train(model, 3 * step + 1) for step in range(3)]
        last = read_output(model.wait(model.train(10, DATA)))[1]
        server.kill()
        server.start()
        last += read_output(model.wait(model.train(11, OTHER)))[1]
        model.wait(model.step(12))
        folder = folder_of(server.folder, model)
        lines = read_metrics(folder / "metrics.jsonl")
        assert [(line["step"], line["train/command"]) for line in lines] == [(1, 3), (2, 6), (3, 9), (4, 12)]
        assert [line["train/loss"] for line in lines] == pytest.approx([*losses, last])
        server.stop()
        assert json.loads((folder / "run.json").read_text())["status"] == "stopped"
        server.start()
        train(model, 13)
        assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_commands_for_runs_read_served_models(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=ServedWorker) as server:
        client = server.client()
        models = [client.create_model(number) for number in range(2)]
        for number, model in enumerate(models):
            for step in range(3):
                train(model, 3 * step + 1, learning_rate=0.01 * (number + 1))
        folders = [folder_of(tmp_path / "served", model) for model in models]
        view = camshaft("view", str(tmp_path / "served"), "--text")
        assert view.status == 0
        assert [str(folder) in view.out for folder in folders] == [True, True]
        assert "running" in view.out
        assert "3/" not in view.out.replace(str(tmp_path), "")  # a served model has no number of steps
        compared = camshaft("compare", *map(str, folders))
        assert compared.status == 0
        assert "train/loss" in compared.out
        assert camshaft("plot", str(folders[0]), "--out", str(tmp_path / "plot.png")).status == 0
        assert (tmp_path / "plot.png").stat().st_size > 1000


# -- times --------------------------------------------------------------------------------------------


def test_times_are_those_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(times, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now)}))
    clock = SessionTimes()
    start = clock.now("a")
    now = 102.0  # two seconds without a job
    clock.added("a")
    clock.added("b")
    with clock.working({"b": 1.0}, "train"):
        now = 105.0  # three seconds of b
    clock.finished("b")
    with clock.working({"a": 1.0}, "train"):
        now = 109.0
        during = clock.now("a") - start  # as a line of a step is written
    clock.finished("a")
    clock.added("a")
    with clock.working({"a": 0.25, "b": 0.75}, "sample"):
        now = 117.0
    clock.finished("a")
    now = 120.0
    assert (during.step, during.client, during.queue, during.train, during.sample) == (9.0, 2.0, 3.0, 4.0, 0.0)
    spent: Any = clock.now("a") - start
    assert (spent.step, spent.client, spent.train, spent.sample) == (20.0, 5.0, 4.0, 2.0)
    assert spent.queue == 9.0  # three behind b, and six that the rows of b took


def test_times_of_a_session_are_forgotten_after_its_last_job() -> None:
    clock = SessionTimes()
    for session in ("a", "a", "b"):
        clock.added(session)
    clock.forget("a")
    clock.finished("a")
    with clock.working({"a": 1.0}, "sample"):  # that was running when the session ended
        pass
    clock.finished("a")
    clock.finished("b")
    assert list(clock._sessions) == ["b"]
