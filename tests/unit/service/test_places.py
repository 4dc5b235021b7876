"""At most `max_models` models have an engine at any time, also while sessions end."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.tinker_clients import BASE, Client, Failed, datum, running_server

from camshaft.roles.served import ServedWorker
from camshaft.service.errors import Refused
from camshaft.service.keys import add_key
from camshaft.service.models import Creation
from camshaft.service.service import Service

DATA = [datum([5, 6, 7, 8, 9])]
RECORD = Creation.read(
    b'{"record": {"base_model": "tiny", "owner": "local", "rank": 8, "alpha": 32.0, "seed": 0, "train_attn": true, '
    b'"train_mlp": true, "train_unembed": true}}'
)


class Counting(ServedWorker):
    """A worker that counts its engines, and whose training can be held."""

    most = 0
    may_train = threading.Event()

    def create(self, *arguments: Any) -> Any:
        result = super().create(*arguments)
        Counting.most = max(Counting.most, len(self.models))
        return result

    def forward_backward(self, *arguments: Any) -> Any:
        Counting.may_train.wait()
        return super().forward_backward(*arguments)


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    Counting.most = 0
    Counting.may_train = threading.Event()
    yield
    Counting.may_train.set()


def creation(client: Client, number: int = 0) -> dict[str, Any]:
    body = {"session_id": client.session, "model_seq_id": number, "base_model": BASE}
    return client.post("create_model", **body, lora_config={"rank": 8})


def test_models_that_are_created_at_once_take_no_place_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, check = threading.Barrier(2), Service._check_disk

    def check_slowly(service: Service) -> None:  # between the count and the new model
        check(service)
        try:
            both.wait(1.0)
        except threading.BrokenBarrierError:
            return

    monkeypatch.setattr(Service, "_check_disk", check_slowly)
    with running_server(tmp_path, worker=Counting, max_models=1) as server, ThreadPoolExecutor(2) as threads:
        body = {"model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}

        def create(client: Client) -> int:
            return client.request("create_model", json.dumps({"session_id": client.session, **body}).encode())[0]

        assert sorted(threads.map(create, [server.client(), server.client()])) == [200, 422]


@pytest.mark.parametrize("num_commands", [1, 4])
def test_a_model_waits_until_those_of_ended_sessions_are_released(tmp_path: Path, num_commands: int) -> None:
    with running_server(tmp_path, worker=Counting, max_models=1) as server:
        first, second, third = server.client(), server.client(), server.client()
        model = first.create_model()
        for number in range(num_commands):
            model.train(number + 1, DATA)
        server.service._end(server.service.sessions.get(first.session))
        promise = creation(second)
        waiting = second.sampler(0, base_model=BASE)
        server.service._end(server.service.sessions.get(second.session))  # before its model is created
        last = creation(third)
        assert promise["request_id"] != last["request_id"]
        assert waiting
        Counting.may_train.set()
        assert third.wait(last)["type"] == "create_model"
        assert Counting.most == 1


def test_no_model_is_created_in_a_session_that_has_just_ended(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=ServedWorker, max_models=1) as server:
        service, client = server.service, server.client()
        session = service.sessions.find(client.session, "local")
        client.finish()
        with pytest.raises(Refused, match="has ended; create a new ServiceClient"):
            service._open_model(session, 0, RECORD, b"digest")
        assert server.client().create_model().log_probs(1, DATA)


def test_sessions_of_other_keys_are_not_named(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.txt", "alice")
    with running_server(tmp_path, tmp_path / "keys.txt", worker=ServedWorker, max_models=2) as server:
        own, other = server.client(), Client(server.url, key, BASE).open()
        own.create_model()
        own.create_model(1)
        body = {"model_seq_id": 2, "base_model": BASE}
        detail = other.post("create_model", 422, **body, session_id=other.session)["detail"]
        assert "2 models are in training (none is of this key)" in detail
        assert own.session not in detail
        detail = own.post("create_model", 422, **body, session_id=own.session)["detail"]
        assert f"2 models are in training (those of this key are in the sessions {own.session})" in detail


def test_commands_behind_a_creation_that_waits_are_executed_after_it(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=Counting, max_models=1) as server:
        first, second = server.client(), server.client()
        model = first.create_model()
        model.train(1, DATA)
        server.service._end(server.service.sessions.get(first.session))
        promise = creation(second)
        early = type(model)(second, promise["model_id"]).train(1, DATA)
        Counting.may_train.set()
        assert second.wait(promise)["type"] == "create_model"
        try:
            assert second.wait(early)
        except Failed as error:
            pytest.fail(f"{error}")
