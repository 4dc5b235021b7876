"""Unexpected errors of the server: they are logged, concern only their request, and leave nothing without an answer."""

import json
import logging
import os
import signal
import socket
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.tinker_clients import BASE, Client, Failed, InProcessRole, datum, running_server
from support.tiny import tiny_folder

from camshaft.cli.serve import serve
from camshaft.config.serve import read_serve_config
from camshaft.roles.served import ServedWorker
from camshaft.service import history, process, sampling
from camshaft.service.service import Service
from camshaft.service.store import LOG, LogError

DATA = [datum([5, 6, 7, 8, 9])]


def test_an_error_in_a_request_is_answered_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Service, "get_info", fail)
    with running_server(tmp_path, worker=ServedWorker) as server:
        client = server.client()
        detail = client.post("get_info", 500, model_id="m")["detail"]
        assert detail == "ZeroDivisionError: by zero; log.txt in the folder of the server has the traceback"
        assert "Traceback" in caplog.text
        assert client.create_model().log_probs(1, DATA)


def test_a_sample_that_cannot_be_read_fails_and_is_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise OverflowError("too large")

    with running_server(tmp_path, worker=ServedWorker) as server:
        client = server.client()
        sampler = client.sampler(0, base_model=BASE)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "read_wanted", fail)
            promise = client.submit_sample(sampler, 0, [5, 6])
        with pytest.raises(Failed, match="OverflowError: too large"):
            client.wait(promise)
        assert client.submit_sample(sampler, 0, [5, 6]) == promise
        assert len(client.sample(sampler, 1, [5, 6])) == 1
    assert "Traceback" in caplog.text


def test_an_error_in_a_check_of_time_limits_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("no such folder")

    for name in ("_sweep_results", "sweep_checkpoints"):
        monkeypatch.setattr(Service, name, fail)
    monkeypatch.setattr("camshaft.service.service.CHECKPOINT_SECONDS", 0.0)
    with running_server(tmp_path, worker=ServedWorker, gap_timeout=1.0) as server:
        model = server.client().create_model()
        with pytest.raises(Failed, match="command 1 of this model did not arrive"):
            model.wait(model.train(2, DATA))
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1  # it is logged once


@pytest.mark.parametrize("content", ["{}", "no JSON", '{"record": {}, "folder": "x"}', '{"record": 1}', "[]"])
def test_a_foreign_file_among_saved_weights_changes_nothing_else(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(tmp_path, worker=ServedWorker) as server:
        client = server.client()
        model = client.create_model()
        for route in ("save_weights", "save_weights_for_sampler"):
            model.call(route, path="a", ttl_seconds=1)
            model.call(route, path="b")
        folder = Path(server.config.folder) / client.session / "0"
        (folder / "weights" / "mine.json").write_text(content)
        time.sleep(1.0)
        server.service.sweep_checkpoints()
        server.service.sweep_checkpoints()
        kept = {
            kind: {path.name.partition(".")[0] for path in (folder / kind).iterdir()}
            for kind in os.listdir(folder)
            if kind.endswith("weights")
        }
        assert kept == {"weights": {"a", "b", "mine"}, "sampler_weights": {"b"}}
        status, listed = client.request("checkpoints", method="GET")
        assert status == 200
        assert len(json.loads(listed)["checkpoints"]) == 2
        body = {"session_id": client.session, "model_seq_id": 1, "path": f"tinker://{model.identifier}/weights/mine"}
        assert "mine.json does not describe saved weights" in client.post("load_weights", 404, **body)["detail"]
        assert caplog.text.count("expired weights in ") == 1
        (folder / "weights" / "mine.json").unlink()
        server.service.sweep_checkpoints()
        assert {path.name.partition(".")[0] for path in (folder / "weights").iterdir()} == {"b"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_server_ends_with_an_error_if_its_log_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign row has the number of the next command."""
    monkeypatch.setattr(process, "RoleProcess", InProcessRole)
    monkeypatch.setattr(logging.getLogger(history.__name__), "handlers", [])  # to which the command adds one
    folder, port, statuses = tmp_path / "served", free_port(), list[int]()
    config = read_serve_config(
        [f"model={BASE}={tiny_folder(tie_embeddings=False)}", f"folder={folder}", f"port={port}", "device=cpu"]
    )

    def use() -> None:
        try:
            while not (folder / "api-key").exists():
                time.sleep(0.05)
            client = Client(f"http://127.0.0.1:{port}", (folder / "api-key").read_text().strip(), BASE, is_patient=True)
            model = client.open().create_model()
            with closing(sqlite3.connect(folder / LOG, isolation_level=None)) as connection:
                connection.execute("INSERT INTO entries (subject, number) VALUES (?, 1)", (model.identifier,))
            body = {"model_id": model.identifier, "seq_id": 1, "adam_params": {}}
            statuses.append(client.request("optim_step", json.dumps(body).encode())[0])
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    thread = threading.Thread(target=use)
    thread.start()
    with pytest.raises(LogError, match="cannot be written: IntegrityError"):
        serve(config)
    thread.join()
    assert statuses == [500]
