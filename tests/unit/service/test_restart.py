"""A server that is killed and started again continues where its log ends."""

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.served_fork import ServedFork
from support.tinker_clients import BASE, Client, ClientModel, Failed, datum, read_samples, running_server
from support.tiny import tiny_folder

from camshaft.errors import WorkerError
from camshaft.roles.sampled import Refusal
from camshaft.roles.served import ServedWorker
from camshaft.service.keys import add_key
from camshaft.service.models import Model
from camshaft.service.store import LOG, Store

DATA = [datum([5, 6, 7, 8, 9]), datum([10, 12, 14], weights=[0.5, -2.0])]
OTHER = [datum([20, 21, 22, 23])]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServedFork]:
    with ServedFork(tmp_path, save_every=2, max_models=4) as server:
        yield server


def restart(server: ServedFork, **options: Any) -> None:
    server.kill()
    server.start(**options)


def train(model: ClientModel, number: int) -> None:
    """Train a step of two chunks, the commands `number` to `number` + 2."""
    late = model.train(number + 1, OTHER)
    model.train(number, DATA)
    model.wait(model.step(number + 2, learning_rate=0.01 * number))
    model.wait(late)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_weights_after_kills_equal_those_of_an_undisturbed_run(server: ServedFork, num_steps: int) -> None:
    client = server.client()
    killed, undisturbed = client.create_model(0), client.create_model(1)
    for step in range(num_steps):
        train(killed, 3 * step + 1)
        restart(server)
    for step in range(num_steps):
        train(undisturbed, 3 * step + 1)
    number = 3 * num_steps + 1
    assert killed.log_probs(number, DATA) == undisturbed.log_probs(number, DATA)


def test_gradients_and_waiting_commands_survive_a_kill(server: ServedFork) -> None:
    client = server.client()
    killed, undisturbed = client.create_model(0), client.create_model(1)
    killed.wait(killed.train(1, DATA))
    step, late = killed.step(4), killed.train(3, DATA)
    restart(server)
    assert killed.step(4) == step  # the same future
    killed.train(2, OTHER)
    for number, data in ((1, DATA), (2, OTHER), (3, DATA)):
        undisturbed.train(number, data)
    assert killed.wait(step) == undisturbed.wait(undisturbed.step(4))
    assert killed.wait(late) == undisturbed.wait(undisturbed.train(3, DATA))


def test_delivered_results_and_their_digests_survive_a_kill(server: ServedFork) -> None:
    client = server.client()
    model = client.create_model()
    sampler = client.sampler(0, base_model="tiny")
    promises = [model.train(1, DATA), model.step(2), model.train(3, [datum([5, 999])])]
    sample = client.submit_sample(sampler, 0, [5, 6], 2)
    bodies = [fetch(client, promise) for promise in (*promises, sample)]
    restart(server)
    assert [fetch(client, promise) for promise in (*promises, sample)] == bodies
    assert [model.train(1, DATA), model.step(2)] == promises[:2]
    assert client.submit_sample(sampler, 0, [5, 6], 2) == sample
    assert "was already sent with another body" in model.step(2, 422, learning_rate=0.5)["detail"]
    with pytest.raises(Failed, match=r"changed no weight and cleared the gradients.*999"):
        model.wait(model.step(4))


def test_fetched_results_expire_and_no_command_runs_again(tmp_path: Path) -> None:
    with ServedFork(tmp_path, result_ttl=0.1) as server:
        client = server.client()
        body = {"session_id": client.session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
        creation = client.post("create_model", **body)
        model = ClientModel(client, client.wait(creation)["model_id"])
        sampler = client.sampler(0, base_model=BASE)
        promises = [model.train(1, DATA), model.step(2), client.submit_sample(sampler, 1, [5, 6], 2)]
        results = [client.wait(promise) for promise in promises]
        trained = model.log_probs(3, DATA)
        for _ in range(2):  # also after a kill
            for promise in promises:
                wait_until_expired(client, promise)
            assert client.post("create_model", **body) == creation
            assert client.wait(creation)["model_id"] == model.identifier
            assert "it has run, and its result has expired" in model.step(2, 422)["detail"]
            assert server.query("SELECT number FROM entries WHERE subject = ?", sampler) == []
            restart(server)
        again = client.wait(client.submit_sample(sampler, 1, [5, 6], 2))
        assert [row.tokens for row in read_samples(again)] == [row.tokens for row in read_samples(results[2])]
        assert model.log_probs(4, DATA) == trained


def wait_until_expired(client: Client, promise: dict[str, Any]) -> None:
    deadline = time.monotonic() + 60
    while (answer := fetch(client, promise))[0] != 410:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert b"it was fetched more than 0.1 s ago (result_ttl)" in answer[1]


def fetch(client: Client, promise: dict[str, Any]) -> tuple[int, bytes]:
    return client.request("retrieve_future", json.dumps({"request_id": promise["request_id"]}).encode())


@pytest.mark.parametrize("content", [b'{"seq_id": 9223372036854775808}', b"{}", b"no JSON"])
def test_a_pending_sample_that_cannot_be_read_fails_after_a_kill(server: ServedFork, content: bytes) -> None:
    client = server.client()
    sampler = client.sampler(0, base_model="tiny")
    promise = client.submit_sample(sampler, 0, [5, 6])
    client.wait(promise)
    server.kill()
    server.query("UPDATE entries SET result = NULL, content = ?", content)
    server.start()
    with pytest.raises(Failed):
        client.wait(promise)
    assert len(client.sample(sampler, 1, [5, 6])) == 1


def test_commands_that_were_given_up_stay_so_after_a_kill(tmp_path: Path) -> None:
    with ServedFork(tmp_path, gap_timeout=0.1) as server:
        model = server.client().create_model()
        before = model.log_probs(1, DATA)
        chunk, step = model.train(3, DATA), model.step(4)
        for promise in (chunk, step):
            with pytest.raises(Failed, match="command 2 of this model did not arrive"):
                model.wait(promise)
        restart(server)
        with pytest.raises(Failed, match="command 2 of this model did not arrive"):
            model.wait(step)
        assert (
            "arrived too late"
            in model.client.post("optim_step", 422, model_id=model.identifier, seq_id=2, adam_params={})["detail"]
        )
        assert model.log_probs(5, DATA) == before


def test_samplers_keep_their_weights_after_a_kill(server: ServedFork) -> None:
    client = server.client()
    model = client.create_model()
    samplers, rows = [client.sampler(50, base_model="tiny")], []
    for step in range(5):  # some of them before the last saved state
        train(model, 4 * step + 1)
        promise = model.command("save_weights_for_sampler", 4 * step + 4, sampling_session_seq_id=step)
        samplers.append(model.wait(promise)["sampling_session_id"])
    rows = [client.sample(sampler, 0, [5, 6], 3, seed=1) for sampler in samplers]
    restart(server)
    for sampler, before in reversed(list(zip(samplers, rows, strict=True))):
        again = read_samples(client.wait(client.submit_sample(sampler, 1, [5, 6], 3, seed=1)))
        assert [row[0] for row in again] == [row[0] for row in before]
        for row, earlier in zip(again, before, strict=True):
            assert row[1] == pytest.approx(earlier[1], abs=1e-6)
    assert len({tuple(row[0][0]) for row in rows}) > 1


def test_published_weights_beyond_the_limit_end_with_their_samplers(tmp_path: Path) -> None:
    """Those that are sampled are kept, and so are those with a name that a sampler uses, and all results."""
    with ServedFork(tmp_path, max_published=3, max_versions=1, save_every=1) as server:
        client, samplers, results = server.client(), list[str](), list[tuple[Any, Any]]()
        model = client.create_model()
        paths = [model.call("save_weights_for_sampler", path=name)["path"] for name in ("used", "unused")]
        named = client.sampler(50, model_path=paths[0])
        for step in range(6):
            number = model.next()
            model.train(number, DATA)
            model.wait(model.step(model.next(), learning_rate=0.01))
            samplers.append(model.publish(step))
            promise = client.submit_sample(samplers[-1], 70, [5, 6], 1, seed=2)
            results.append((promise, client.wait(promise)))
            client.sample(samplers[1 if step else 0], step, [5, 6], seed=1)
        used = {
            sampler: client.sample(sampler, 10, [5, 6], 2, seed=1) for sampler in (named, *samplers[-2:], samplers[1])
        }
        for _ in range(2):  # also after a kill
            assert len(list((server.folder / "versions").iterdir())) <= 4
            for sampler in samplers[:1] + samplers[2:-2]:
                body = {"sampling_session_id": sampler, "seq_id": 99, "prompt": {"chunks": []}, "sampling_params": {}}
                assert "more than `max_published` sets" in client.post("asample", 404, **body)["detail"]
            assert all(client.wait(promise) == result for promise, result in results)
            for sampler, rows in used.items():
                again = client.sample(sampler, 11, [5, 6], 2, seed=1)
                assert [row.tokens for row in again] == [row.tokens for row in rows]
            restart(server)
        assert client.sample(client.sampler(51, model_path=paths[1]), 0, [5, 6])  # from its checkpoint
        model.publish(6)
        for sampler, status in ((samplers[-2], 404), (samplers[-1], 200), (samplers[1], 200)):
            assert client.request(f"samplers/{sampler}", method="GET")[0] == status


def test_a_log_of_the_earlier_format_is_read(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / LOG)) as connection:
        connection.executescript(
            "CREATE TABLE samplers (session TEXT, number INTEGER, base_model TEXT, source TEXT, PRIMARY KEY "
            "(session, number)) WITHOUT ROWID; CREATE TABLE sessions (session TEXT PRIMARY KEY, owner TEXT);"
            "INSERT INTO sessions VALUES ('s', 'local'); INSERT INTO samplers VALUES ('s', 3, 'tiny', '{}');"
            "PRAGMA user_version = 1"
        )
    store = Store(tmp_path / LOG)
    assert store.samplers() == [("s", 3, "tiny", "{}", 0.0)]
    store.close()


def test_a_load_is_restored_although_its_weights_are_replaced(server: ServedFork) -> None:
    client = server.client()
    model = client.create_model()
    train(model, 1)
    path = model.wait(model.command("save_weights", 4, path="a"))["path"]
    saved = model.log_probs(5, DATA)
    train(model, 6)
    model.wait(model.command("load_weights", 9, path=path, optimizer=True))
    body = {"session_id": client.session, "model_seq_id": 1, "path": path}
    promise = client.post("load_weights", **body)
    client.wait(promise)
    train(model, 10)
    after = model.log_probs(13, DATA)
    model.wait(model.command("save_weights", 14, path="a", overwrite=True))
    restart(server)
    assert client.post("load_weights", **body) == promise
    assert ClientModel(client, promise["model_id"]).log_probs(1, DATA) == saved
    assert model.log_probs(15, DATA) == after


def test_a_save_that_was_interrupted_is_done_once(server: ServedFork) -> None:
    client = server.client()
    model = client.create_model()
    train(model, 1)
    promise = model.command("save_weights", 4, path="a")
    result = model.wait(promise)
    server.kill()
    # As if the server had been killed between the checkpoint and its result.
    server.query("UPDATE entries SET result = NULL, content = ? WHERE number = 4", body_of(model, path="a"))
    server.start()
    assert model.wait(promise) == result
    with pytest.raises(Failed, match="exists, and saved weights do not change"):
        model.wait(model.command("save_weights", 5, path="a"))


def body_of(model: ClientModel, **body: Any) -> bytes:
    return json.dumps({"model_id": model.identifier, "seq_id": 4, **body}).encode()


def test_a_different_result_closes_the_model(server: ServedFork) -> None:
    client = server.client()
    changed, other = client.create_model(0), client.create_model(1)
    for model in (changed, other):
        train(model, 1)
    server.kill()
    where = f"subject = '{changed.identifier}' AND number = 3"
    [(body,)] = server.query(f"SELECT result FROM entries WHERE {where}")
    result = json.loads(body)
    result["metrics"]["grad_norm"] += 0.5
    server.query(f"UPDATE entries SET result = ? WHERE {where}", json.dumps(result).encode())
    server.start()
    sentence = (
        r"command 3 \(optim_step\), which was executed again, gave a result that differs by 0.5 "
        r".*replay_tolerance \(0\)"
    )
    for number in (4, 5):
        with pytest.raises(Failed, match=sentence):
            changed.wait(changed.train(number, DATA))
    assert len(other.log_probs(4, DATA)) == 2
    restart(server, replay_tolerance=1.0)
    assert len(changed.log_probs(6, DATA)) == 2


def test_bodies_before_the_saved_state_are_dropped(server: ServedFork) -> None:
    model = server.client().create_model()
    for step in range(5):
        train(model, 3 * step + 1)
    rows = server.query("SELECT number FROM entries WHERE content IS NOT NULL AND number > 0 ORDER BY number")
    assert [row[0] for row in rows] == [13, 14, 15]
    states = server.folder / model.client.session / "0" / "states"
    assert sorted(path.name for path in states.iterdir()) == ["12", "6"]
    restart(server)
    train(model, 16)
    assert sorted(path.name for path in states.iterdir()) == ["12", "18"]


def test_a_stopped_server_saves_its_models_and_keeps_its_sessions(server: ServedFork) -> None:
    client = server.client()
    model = client.create_model()
    train(model, 1)
    after = model.log_probs(4, DATA)
    model.train(5, DATA)  # gradients, which are computed again
    server.stop()
    record = json.loads((server.folder / client.session / "0" / "weights" / "last.json").read_text())["record"]
    assert record["by_server"] is True
    server.start()
    other = server.client()
    body = {"session_id": other.session, "model_seq_id": 0, "path": f"tinker://{model.identifier}/weights/last"}
    promise = other.post("load_weights", **body)
    other.wait(promise)
    loaded = ClientModel(other, promise["model_id"])
    assert loaded.log_probs(1, DATA) == model.log_probs(6, DATA) == after
    loaded.train(2, DATA)
    assert model.wait(model.step(7))["metrics"]["grad_norm"] == pytest.approx(
        loaded.wait(loaded.step(3))["metrics"]["grad_norm"], rel=1e-6
    )


def test_a_finished_session_leaves_nothing_in_the_log(server: ServedFork) -> None:
    client = server.client()
    model = client.create_model()
    train(model, 1)
    train(model, 4)
    client.sampler(0, base_model="tiny")
    client.request(f"sessions/{client.session}/finish", b"{}")
    restart(server)
    for table in ("sessions", "samplers", "states", "entries"):
        assert server.query(f"SELECT count(*) FROM {table}") == [(0,)]
    assert not list((server.folder / client.session / "0" / "states").iterdir())
    assert client.request("session_heartbeat", json.dumps({"session_id": client.session}).encode())[0] == 410


def test_a_session_whose_base_model_is_not_served_any_more_keeps_the_others(server: ServedFork) -> None:
    client = server.client()
    model = client.create_model()
    model.wait(model.train(1, DATA))
    sampler = client.sampler(0, base_model="tiny")
    server.kill()
    server.start(model=f"renamed={tiny_folder(tie_embeddings=False)}")
    assert client.request("get_info", json.dumps({"model_id": model.identifier}).encode())[0] == 404
    assert client.request(f"samplers/{sampler}", method="GET")[0] == 404
    client.base = "renamed"
    assert len(client.create_model(1).log_probs(1, DATA)) == 2


def test_models_survive_a_kill_after_their_results_have_expired(server: ServedFork) -> None:
    restart(server, result_ttl=0.1, session_timeout=4.0)
    client = server.client()
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
    created = client.post("create_model", **body)
    model = ClientModel(client, client.wait(created)["model_id"])
    train(model, 1)
    after = model.log_probs(4, DATA)
    wait_until(lambda: server.query("SELECT count(*) FROM entries WHERE is_expired") == [(3,)])
    restart(server)
    assert client.post("create_model", **body) == created
    assert model.log_probs(5, DATA) == after
    saved = server.folder / client.session / "0" / "weights" / "last.json"
    wait_until(saved.exists)  # its session has ended


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_models_and_samplers_of_a_missing_base_model_are_kept_until_it_is_back(server: ServedFork) -> None:
    client = server.client()
    model, other = client.create_model(0), client.create_model(1)
    for each in (model, other):
        train(each, 1)
    sampler = model.wait(model.command("save_weights_for_sampler", 4, sampling_session_seq_id=0))
    train(model, 5)
    row = client.sample(sampler["sampling_session_id"], 0, [5, 6], seed=1)
    after = model.log_probs(8, DATA)
    own = server.options.get("model", f"{BASE}={tiny_folder(tie_embeddings=False)}")
    restart(server, model=f"renamed={tiny_folder(tie_embeddings=False)}")
    client.base = "renamed"
    body = {"session_id": client.session, "base_model": "renamed"}
    taken = client.post("create_model", 422, **body, model_seq_id=0, lora_config={"rank": 8})
    assert "model 0 was already sent with another body" in taken["detail"]
    taken = client.post("create_sampling_session", 422, **body, sampling_session_seq_id=0)
    assert "sampler 0 of the session has a base model that is not served any more" in taken["detail"]
    assert len(client.create_model(2).log_probs(1, DATA)) == 2
    restart(server, model=own)
    (again,) = client.sample(sampler["sampling_session_id"], 1, [5, 6], seed=1)
    assert again.tokens == row[0].tokens
    assert model.log_probs(9, DATA) == after


def test_a_session_that_ends_without_its_base_model_is_saved_when_it_is_back(server: ServedFork) -> None:
    client = server.client()
    model = client.create_model()
    train(model, 1)
    after = model.log_probs(4, DATA)
    restart(server, model=f"renamed={tiny_folder(tie_embeddings=False)}")
    client.base = "renamed"
    client.create_model(1)
    client.finish()
    assert server.query("SELECT DISTINCT subject FROM entries") == [(model.identifier,)]
    restart(server, model=f"{BASE}={tiny_folder(tie_embeddings=False)}", session_timeout=1.0)
    saved = server.folder / client.session / "0" / "weights" / "last.json"
    wait_until(saved.exists)
    wait_until(lambda: server.query("SELECT count(*) FROM sessions") == [(0,)])
    restart(server, session_timeout=600.0)
    loaded = server.client().load_model(0, f"tinker://{model.identifier}/weights/last")
    assert loaded.log_probs(1, DATA) == after


def test_commands_are_refused_without_space_on_the_disk(server: ServedFork) -> None:
    client = server.client()
    model = client.create_model()
    promise = model.train(1, DATA)
    model.wait(promise)
    restart(server, min_free_gb=1_000_000)
    assert "it stops training below 1e+06 GB (min_free_gb); end programs that have" in model.step(2, 422)["detail"]
    assert model.wait(promise)
    restart(server, min_free_gb=0)
    assert model.wait(model.step(2))["metrics"]["grad_norm"] > 0


class HeldSampling(ServedWorker):
    """A worker that samples when `begin` is set."""

    begin = threading.Event()

    def sample(self, *args: Any) -> Any:
        assert self.begin.wait(60)
        return super().sample(*args)


def test_the_log_keeps_the_seed_of_a_request_without_one(tmp_path: Path) -> None:
    """So the samples are the same if the server is started again with another `seed`."""
    with running_server(tmp_path, worker=HeldSampling) as server:
        client = server.client()
        sampler = client.sampler(0, base_model=BASE)
        promise = client.submit_sample(sampler, 1, [5, 6], 2)
        assert client.submit_sample(sampler, 1, [5, 6], 2) == promise
        server.service.store.flush()
        with contextlib.closing(sqlite3.connect(tmp_path / "served" / LOG)) as connection:
            [(content,)] = connection.execute("SELECT content FROM entries WHERE subject = ?", (sampler,)).fetchall()
        HeldSampling.begin.set()
        seed = json.loads(content)["sampling_params"]["seed"]
        rows = client.sample(sampler, 2, [5, 6], 2, seed=seed)
        assert [row.tokens for row in read_samples(client.wait(promise))] == [row.tokens for row in rows]


class FullDisk(ServedWorker):
    """A worker that cannot save while `is_full`."""

    is_full = False

    def save(self, model_id: str, folder: str, is_state: bool) -> Any:
        if FullDisk.is_full:
            return Refusal("no space left on device")
        return super().save(model_id, folder, is_state)


def test_a_model_that_cannot_be_saved_at_the_end_of_its_session_is_released_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FullDisk, "is_full", True)
    with running_server(tmp_path, worker=FullDisk, max_models=1) as server:
        client = server.client()
        model = client.create_model()
        train(model, 1)
        after = model.log_probs(4, DATA)
        server.finish()
        server.client().create_model()
        server.finish()
    FullDisk.is_full = False
    with running_server(tmp_path, worker=FullDisk, session_timeout=1.0):
        wait_until((tmp_path / "served" / client.session / "0" / "weights" / "last.json").exists)
    with running_server(tmp_path, worker=FullDisk) as server:
        loaded = server.client().load_model(0, f"tinker://{model.identifier}/weights/last")
        assert loaded.log_probs(1, DATA) == after


def test_the_last_recorded_state_remains_until_the_next_one_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, remove, kept = Store._commit, Model.remove_states, list[Any]()

    def commit_slowly(store: Store, writes: Any) -> bool:
        if any("INTO states" in text for write in writes for text, _ in write.statements):
            time.sleep(0.5)
        return commit(store, writes)

    def record(model: Model, but: Any = None) -> None:
        kept.append(None if but is None else but.number)
        remove(model, but)

    monkeypatch.setattr(Store, "_commit", commit_slowly)
    monkeypatch.setattr(Model, "remove_states", record)
    with running_server(tmp_path, worker=ServedWorker, save_every=1) as server:
        model = server.client().create_model()
        promises = [model.step(2), model.train(3, DATA), model.step(4), model.train(5, DATA), model.step(6)]
        model.train(1, DATA)  # all of them run one after the other
        for promise in promises:
            model.wait(promise)
        assert kept == [None, 2, 4]


class DyingWorker(ServedWorker):
    """A worker that dies in each forward_backward of a token."""

    TOKEN = 77
    num_deaths = 0

    def forward_backward(self, model_id: str, rows: Any, loss: str, options: Any, forward_only: bool) -> Any:
        if self.TOKEN in rows.ragged("input_ids").values.tolist():
            DyingWorker.num_deaths += 1
            raise WorkerError("rank 0 died: out of memory")
        return super().forward_backward(model_id, rows, loss, options, forward_only)


def test_a_command_in_which_the_worker_dies_fails_and_no_other(tmp_path: Path) -> None:
    with running_server(tmp_path, worker=DyingWorker, max_models=2) as server:
        client = server.client()
        model, undisturbed = client.create_model(0), client.create_model(1)
        for each in (model, undisturbed):
            train(each, 1)
        good, deadly, step = model.train(4, DATA), model.train(5, [datum([5, 77, 6])]), model.step(6)
        assert model.wait(good)
        with pytest.raises(Failed, match=r"the worker process ended in each of 3 attempts: .*out of memory") as caught:
            model.wait(deadly)
        assert caught.value.category == "server"
        with pytest.raises(Failed, match=r"changed no weight and cleared the gradients.*ended in each of 3 attempts"):
            model.wait(step)
        assert DyingWorker.num_deaths == 3
        assert model.log_probs(7, DATA) == undisturbed.log_probs(4, DATA)
        promises = [each.train(number, OTHER) for each, number in ((model, 8), (undisturbed, 5))]
        assert model.wait(promises[0]) == undisturbed.wait(promises[1])
        assert model.wait(model.step(9)) == undisturbed.wait(undisturbed.step(6))


def test_a_session_of_another_key_is_invisible(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    key = add_key(keys, "alice")
    with running_server(tmp_path, keys, worker=ServedWorker) as server:
        owner, stranger = server.client(), Client(server.url, key, BASE).open()
        model = owner.create_model()
        model.wait(model.command("save_weights", 1, path="a"))
        for path in ("training_runs", "checkpoints", "sessions"):
            lists = json.loads(stranger.request(path, method="GET")[1])
            assert owner.session not in json.dumps(lists)
        url = f"training_runs/{model.identifier}"
        assert stranger.request(url, method="GET")[0] == 404
        assert stranger.request(f"{url}/checkpoints/weights/a", method="DELETE")[0] == 404
        assert stranger.request(f"sessions/{owner.session}", method="GET")[0] == 401
        assert owner.request(f"{url}/checkpoints/weights/a", method="DELETE")[0] == 200
