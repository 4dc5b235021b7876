"""The server with a client of our own: order, repetitions, gaps, failed chunks, samples, saved weights, crashes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from support.tinker_clients import (
    BASE,
    Client,
    Failed,
    RunningServer,
    datum,
    read_output,
    read_samples,
    running_server,
    training_request,
)
from support.tiny import tiny_folder
from transformers import AutoModelForCausalLM

from camshaft.controller.process_pool import ProcessPool

DATA = [datum([5, 6, 7, 8, 9]), datum([10, 12, 14], weights=[0.5, -2.0]), datum([30, 31])]
TOKENS = [[5, 6, 7, 8, 9], [10, 12, 14], [30, 31]]
WEIGHTS = [[1.0] * 4, [0.5, -2.0], [1.0]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), max_models=3, gap_timeout=2.0, max_versions=2) as server:
        yield server


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    yield shared
    shared.finish()


@pytest.fixture
def client(server: RunningServer) -> Client:
    return server.client()


def reference_log_probs(inputs: list[int], targets: list[int]) -> list[float]:
    """Compute log-probs of targets with transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(tie_embeddings=False), dtype=torch.float64).eval()
    with torch.no_grad():
        scores = model(torch.tensor([inputs])).logits[0].log_softmax(-1)
    return scores[torch.arange(len(inputs)), targets].tolist()


def test_log_probs_and_loss_equal_those_of_transformers(client: Client) -> None:
    free = datum([5, 6, 7], targets=[0, 50, 3], weights=[0.0, 1.0, 2.0])
    model = client.create_model()
    rows, loss = read_output(model.wait(model.train(1, [*DATA, free])))
    expected = [reference_log_probs(tokens[:-1], tokens[1:]) for tokens in TOKENS]
    expected.append(reference_log_probs([5, 6, 7], [0, 50, 3]))
    for row, values in zip(rows, expected, strict=True):
        assert row == pytest.approx(values, abs=1e-5)
    weights = [*WEIGHTS, [0.0, 1.0, 2.0]]
    total = -sum(w * v for row, values in zip(weights, expected, strict=True) for w, v in zip(row, values, strict=True))
    assert loss == pytest.approx(total, rel=1e-5)


def test_chunks_add_up_in_the_order_of_their_numbers(client: Client) -> None:
    ordered, shuffled = client.create_model(0), client.create_model(1)
    promises = [ordered.train(1, DATA[:1]), ordered.train(2, DATA[1:]), ordered.step(3)]
    # The SDK sends the first chunk last.
    late = [shuffled.step(3), shuffled.train(2, DATA[1:]), shuffled.train(1, DATA[:1])]
    norms = [ordered.wait(promises[2])["metrics"], shuffled.wait(late[0])["metrics"]]
    assert norms[0] == norms[1]
    whole = client.create_model(2)
    whole.wait(whole.train(1, DATA))
    assert whole.wait(whole.step(2))["metrics"]["grad_norm"] == pytest.approx(norms[0]["grad_norm"], rel=1e-5)
    assert ordered.log_probs(4, DATA) == shuffled.log_probs(4, DATA)


def test_a_repeated_command_has_one_future_and_runs_once(client: Client) -> None:
    once, repeated = client.create_model(0), client.create_model(1)
    once.train(1, DATA)
    norm = once.wait(once.step(2))["metrics"]
    promises = [repeated.train(1, DATA) for _ in range(3)]
    steps = [repeated.step(2), repeated.step(2)]
    assert len({promise["request_id"] for promise in promises}) == 1
    assert steps[0] == steps[1]
    assert repeated.wait(steps[1])["metrics"] == norm
    assert repeated.step(2) == steps[0]  # also after it is delivered
    assert repeated.wait(steps[0])["metrics"] == norm
    assert once.log_probs(3, DATA) == repeated.log_probs(3, DATA)


def test_the_same_number_with_another_body_is_refused(client: Client) -> None:
    model = client.create_model()
    model.train(1, DATA)
    model.step(2)
    assert "command 2 was already sent with another body" in model.step(2, 422, learning_rate=0.5)["detail"]
    changed = training_request(model.identifier, 1, DATA[:1]).SerializeToString()
    assert client.request("forward_backward", changed, "application/x-protobuf")[0] == 422


def test_a_gap_ends_with_the_missing_number(client: Client) -> None:
    model = client.create_model()
    before = model.log_probs(1, DATA)
    chunk, step = model.train(3, DATA), model.step(4)
    for promise in (chunk, step):
        with pytest.raises(Failed, match="command 2 of this model did not arrive within 2 s"):
            model.wait(promise)
    request = training_request(model.identifier, 2, DATA).SerializeToString()
    status, content = client.request("forward_backward", request, "application/x-protobuf")
    assert status == 422
    assert b"arrived too late" in content
    assert model.log_probs(5, DATA) == before
    model.wait(model.train(6, DATA))
    assert model.wait(model.step(7))["metrics"]["grad_norm"] > 0


def test_a_failed_chunk_fails_the_step_and_clears_the_gradients(client: Client) -> None:
    model, undisturbed = client.create_model(0), client.create_model(1)
    before = model.log_probs(1, DATA)
    good, bad, step = model.train(2, DATA), model.train(3, [datum([5, 999])]), model.step(4)
    model.wait(good)
    sentence = r"datum 0: target_tokens\[0\] is 999, but the token ids of the model are 0..111"
    with pytest.raises(Failed, match=sentence):
        model.wait(bad)
    with pytest.raises(Failed, match=f"changed no weight and cleared the gradients.*{sentence}") as caught:
        model.wait(step)
    assert caught.value.category == "user"
    assert model.log_probs(5, DATA) == before
    model.train(6, DATA)
    undisturbed.train(1, DATA)
    assert model.wait(model.step(7)) == undisturbed.wait(undisturbed.step(2))
    assert model.log_probs(8, DATA) == undisturbed.log_probs(3, DATA)


def test_a_datum_with_an_infinite_loss_is_named(client: Client) -> None:
    data = [datum([5, 6, 7], logprobs=[old] * 2, advantages=[1.0] * 2) for old in (-1.0, -1e4)]
    model = client.create_model()
    with pytest.raises(Failed, match="datum 1: the loss is not finite"):
        model.wait(model.train(1, data, "importance_sampling"))


def test_forward_only_changes_neither_gradients_nor_weights(client: Client) -> None:
    model = client.create_model()
    before = model.log_probs(1, DATA)
    with pytest.raises(Failed, match="optim_step found no gradient"):
        model.wait(model.step(2))
    assert model.log_probs(3, DATA) == before


def test_hyperparameters_of_each_step_are_those_of_the_request(client: Client) -> None:
    """With eps = 1 and beta1 = 0 the first update is lr * g / (|g| + 1); without a rate nothing changes."""
    model = client.create_model()
    model.train(1, DATA)
    model.wait(model.step(2, learning_rate=0.0))
    before = model.log_probs(3, DATA)
    model.train(4, DATA)
    clipped = model.wait(model.step(5, grad_clip_norm=1e-6, beta1=0.0, eps=1.0))["metrics"]["grad_norm"]
    assert clipped > 1.0
    after = model.log_probs(6, DATA)
    assert after != before
    assert after[0] == pytest.approx(before[0], abs=1e-4)


def test_a_wrong_hyperparameter_is_a_failed_result(client: Client) -> None:
    model = client.create_model()
    model.wait(model.train(1, DATA))
    with pytest.raises(Failed, match=r"lr=-1.0 is not a finite number of at least 0; correct adam_params"):
        model.wait(model.step(2, learning_rate=-1.0))
    assert model.wait(model.step(3))["metrics"]["grad_norm"] > 0


# -- samples ------------------------------------------------------------------------------------------


def test_samples_depend_on_seed_and_row_only(client: Client) -> None:
    sampler = client.sampler(0, base_model="tiny")
    many = client.sample(sampler, 0, [5, 6, 7], 4, seed=20)
    assert [row[0] for row in client.sample(sampler, 1, [5, 6, 7], 1, seed=22)] == [many[2][0]]
    both = [client.submit_sample(sampler, number, [5, 6, 7], 4, seed=20) for number in (2, 3)]
    assert both[0] != both[1]
    for promise in both:
        assert [row[0] for row in read_samples(client.wait(promise))] == [row[0] for row in many]
    assert len({tuple(row[0]) for row in many}) > 1


def test_a_program_that_runs_twice_gets_the_same_samples_without_a_seed(server: RunningServer) -> None:
    rows = []
    for _ in range(2):
        client = server.client()
        sampler = client.sampler(0, base_model="tiny")
        rows.append([client.sample(sampler, number, [5, 6, 7])[0][0] for number in (0, 1)])
    assert rows[0] == rows[1]
    assert rows[0][0] != rows[0][1]


def test_log_probs_of_samples_are_those_of_the_trained_model(client: Client) -> None:
    model = client.create_model()
    model.train(1, DATA)
    model.step(2)
    result = model.wait(model.command("save_weights_for_sampler", 3, sampling_session_seq_id=0))
    assert result["path"] is None
    tokens, log_probs, _ = client.sample(result["sampling_session_id"], 0, [5, 6, 7], seed=3)[0]
    recomputed = model.log_probs(4, [datum([5, 6, 7, *tokens])])[0]
    assert recomputed[2:] == pytest.approx(log_probs, abs=1e-5)


def test_a_sampler_keeps_its_weights_while_training_goes_on(client: Client) -> None:
    model = client.create_model()
    samplers, rows, number = [], [], 1
    for step in range(4):  # more versions than are kept in memory
        result = model.wait(model.command("save_weights_for_sampler", number, sampling_session_seq_id=step))
        samplers.append(result["sampling_session_id"])
        rows.append(client.sample(samplers[-1], 0, [5, 6], 3, seed=1))
        model.train(number + 1, DATA)
        model.step(number + 2, learning_rate=0.1)
        number += 3
    assert rows[0] != rows[3]
    again = [client.submit_sample(sampler, 1, [5, 6], 3, seed=1) for sampler in reversed(samplers)]
    for promise, before in zip(again, reversed(rows), strict=True):
        for (tokens, log_probs, _), (earlier, expected, _) in zip(
            read_samples(client.wait(promise)), before, strict=True
        ):
            assert tokens == earlier
            assert log_probs == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("form", ["ids", "none", "empty"])
def test_stop_ends_a_sample_at_exactly_what_it_names(client: Client, form: str) -> None:
    sampler = client.sampler(0, base_model="tiny")
    free = client.sample(sampler, 0, [5, 6, 7], seed=5, stop=[], max_tokens=16)[0]
    assert len(free[0]) == 16
    assert free[2] == 1
    if form == "ids":
        stopped = client.sample(sampler, 1, [5, 6, 7], seed=5, stop=[free[0][3]], max_tokens=16)[0]
        end = free[0].index(free[0][3]) + 1
        assert (stopped[0], stopped[2]) == (free[0][:end], 0)
    elif form == "none":
        assert client.sample(sampler, 1, [5, 6, 7], seed=5, max_tokens=3)[0][0] == free[0][:3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 .greedy. or more, got -1.0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"seed": -1}, "seed=-1 is not from 0"),
    ],
)
def test_a_wrong_request_for_samples_is_a_failed_result(client: Client, change: dict[str, Any], message: str) -> None:
    sampler = client.sampler(0, base_model="tiny")
    with pytest.raises(Failed, match=message):
        client.sample(sampler, 0, [5, 6], **change)
    assert len(client.sample(sampler, 1, [5, 6])) == 1


def test_a_repeated_request_for_samples_has_one_future(client: Client) -> None:
    sampler = client.sampler(0, base_model="tiny")
    first = client.submit_sample(sampler, 7, [5, 6], seed=1)
    assert client.submit_sample(sampler, 7, [5, 6], seed=1) == first
    body = {"sampling_session_id": sampler, "seq_id": 7, "sampling_params": {}, "prompt": {"chunks": []}}
    assert "sample 7 was already sent with another body" in client.post("asample", 422, **body)["detail"]


# -- saved weights --------------------------------------------------------------------------------------


def test_saved_weights_do_not_change_and_are_replaced_as_a_whole(client: Client) -> None:
    model = client.create_model()
    path = model.wait(model.command("save_weights", 1, path="first"))["path"]
    before = model.log_probs(2, DATA)
    model.train(3, DATA)
    model.step(4)
    with pytest.raises(Failed, match="exists, and saved weights do not change"):
        model.wait(model.command("save_weights", 5, path="first"))
    after = model.log_probs(6, DATA)
    model.wait(model.command("load_weights", 7, path=path))
    assert model.log_probs(8, DATA) == before != after
    model.train(9, DATA)
    model.step(10)
    changed = model.log_probs(11, DATA)
    model.wait(model.command("save_weights", 12, path="first", overwrite=True))
    model.train(13, DATA)
    model.step(14)
    model.wait(model.command("load_weights", 15, path=path))
    assert model.log_probs(16, DATA) == changed


def test_a_state_is_saved_without_pending_gradients_only(client: Client) -> None:
    model = client.create_model()
    model.train(1, DATA)
    with pytest.raises(Failed, match="gradients of 1 calls of forward_backward"):
        model.wait(model.command("save_weights", 2, path="pending"))
    assert model.wait(model.step(3))["metrics"]["grad_norm"] > 0


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_model_is_created_from_saved_weights(client: Client, with_optimizer: bool) -> None:
    model = client.create_model(train_mlp=False)
    for number in (1, 3):
        model.train(number, DATA)
        model.step(number + 1, learning_rate=0.1)
    path = model.wait(model.command("save_weights", 5, path="state"))["path"]
    info = client.post("weights_info", tinker_path=path)
    expected = {"base_model": "tiny", "is_lora": True, "lora_rank": 8, "train_mlp": False}
    assert info.items() >= expected.items()
    body = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": with_optimizer}
    promise = client.post("load_weights", **body)
    loaded = type(model)(client, promise["model_id"])
    assert client.wait(promise)["model_id"] == f"{client.session}:train:1"
    assert loaded.log_probs(1, DATA) == model.log_probs(6, DATA)
    model.train(7, DATA)
    loaded.train(2, DATA)
    assert model.wait(model.step(8, learning_rate=0.1)) == loaded.wait(loaded.step(3, learning_rate=0.1))
    assert (loaded.log_probs(4, DATA) == model.log_probs(9, DATA)) == with_optimizer


def test_weights_with_a_name_are_sampled_in_another_session(server: RunningServer) -> None:
    client = server.client()
    model = client.create_model()
    model.train(1, DATA)
    model.step(2, learning_rate=0.1)
    path = model.wait(model.command("save_weights_for_sampler", 3, path="final"))["path"]
    assert path == f"tinker://{model.identifier}/sampler_weights/final"
    rows = client.sample(client.sampler(0, model_path=path), 0, [5, 6], 2, seed=4)
    server.finish()  # which forgets the weights in memory
    other = server.client()
    sampler = other.sampler(0, model_path=path)
    again = other.sample(sampler, 0, [5, 6], 2, seed=4)
    assert [row[0] for row in again] == [row[0] for row in rows]
    status, content = other.request(f"samplers/{sampler}", method="GET")
    assert (status, json.loads(content)["model_path"]) == (200, path)


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 200])
def test_a_name_is_no_path(client: Client, name: str) -> None:
    model = client.create_model()
    with pytest.raises(Failed, match="cannot be the name of saved weights"):
        model.wait(model.command("save_weights", 1, path=name))


@pytest.mark.parametrize("path", ["tinker://../x:train:0/weights/a", "/etc/passwd", "tinker://a:train:0/weights/../b"])
def test_a_path_that_leaves_the_folder_is_refused(client: Client, path: str) -> None:
    body = {"session_id": client.session, "model_seq_id": 0, "path": path}
    assert "is not the path of saved weights" in client.post("load_weights", 404, **body)["detail"]


def get(client: Client, path: str) -> dict[str, Any]:
    status, content = client.request(path, method="GET")
    assert status == 200, content
    return json.loads(content)


def test_saved_weights_are_listed_and_deleted(server: RunningServer) -> None:
    client = server.client()
    model = client.create_model()
    paths = [model.wait(model.command("save_weights", n, path=f"s{n}"))["path"] for n in (1, 2)]
    paths.append(model.wait(model.command("save_weights_for_sampler", 3, path="s3", ttl_seconds=3600))["path"])
    listed = get(client, f"training_runs/{model.identifier}/checkpoints")["checkpoints"]
    assert [row["tinker_path"] for row in listed] == paths[::-1]
    assert [row["checkpoint_type"] for row in listed] == ["sampler", "training", "training"]
    assert [row["expires_at"] is None for row in listed] == [False, True, True]
    assert all(row["size_bytes"] > 1000 for row in listed)
    page = get(client, "checkpoints?limit=1&offset=1")
    assert page["checkpoints"] == listed[1:2]
    assert page["cursor"].items() >= {"offset": 1, "limit": 1}.items()
    run = get(client, f"training_runs/{model.identifier}")
    assert run["last_checkpoint"]["tinker_path"] == paths[1]
    listed_runs = {row["training_run_id"]: row for row in get(client, "training_runs")["training_runs"]}
    assert listed_runs[model.identifier].items() >= {**run, "last_request_time": ANY}.items()
    assert get(client, f"sessions/{client.session}")["training_run_ids"] == [model.identifier]
    assert client.session in get(client, "sessions")["sessions"]
    assert client.request(f"training_runs/{model.identifier}/checkpoints/weights/s2", method="DELETE")[0] == 200
    assert client.request(f"training_runs/{model.identifier}/checkpoints/weights/s2", method="DELETE")[0] == 404
    body = {"session_id": client.session, "model_seq_id": 1, "path": paths[1]}
    assert "no weights are saved under this path" in client.post("load_weights", 404, **body)["detail"]
    assert client.request("checkpoints?limit=-1", method="GET")[0] == 422


def test_weights_that_a_sampler_uses_outlive_their_name(server: RunningServer) -> None:
    client = server.client()
    model = client.create_model()
    path = model.wait(model.command("save_weights_for_sampler", 1, path="used", ttl_seconds=3600))["path"]
    model.wait(model.command("save_weights", 2, path="unused"))
    sampler = client.sampler(0, model_path=path)
    rows = client.sample(sampler, 0, [5, 6], 2, seed=4)
    url = f"training_runs/{model.identifier}/checkpoints"
    status, _ = client.request(f"{url}/weights/unused/ttl", b'{"ttl_seconds": 1}', method="PUT")
    assert status == 200
    assert client.request(f"{url}/sampler_weights/used", method="DELETE")[0] == 200
    folder = Path(server.config.folder) / client.session / "0"
    while (folder / "weights" / "unused.json").exists():
        time.sleep(0.1)
        server.service.sweep_checkpoints()
    assert not list((folder / "weights").iterdir())
    kill_worker(server)  # whose memory has the weights
    assert [row[0] for row in client.sample(sampler, 1, [5, 6], 2, seed=4)] == [row[0] for row in rows]
    server.finish()
    server.service.sweep_checkpoints()
    assert not list((folder / "sampler_weights").iterdir())


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("POST", "copy_weights", "load them in a new training client, and call save_state"),
        ("POST", "training_runs/a:train:0/checkpoints/weights/x/publish", "run `camshaft export` on the machine"),
        ("GET", "training_runs/a:train:0/checkpoints/x/external_weights_urls", "run `camshaft export` on the machine"),
        ("GET", "billing/usage/events", "sends no bills"),
        ("GET", "audit", "log.txt in the folder of the server"),
        ("PUT", "sessions/a/project", "there are no projects"),
        ("POST", "other", "see 'Differences from the hosted service' in docs/serve.md"),
    ],
)
def test_what_is_not_served_has_a_remedy(client: Client, method: str, path: str, remedy: str) -> None:
    status, content = client.request(path, b"{}", method=method)
    assert status == 404
    assert remedy in json.loads(content)["detail"]


def test_an_export_fails_with_the_command_that_writes_it(server: RunningServer, tmp_path: Path) -> None:
    client = server.client()
    model = client.create_model()
    with pytest.raises(Failed, match=r"call save_state\('mine'\), and run `camshaft export") as caught:
        model.call("save_weights_external", path="mine")
    path = model.call("save_weights", path="mine")["path"]  # the next number
    loaded = client.load_model(1, path)
    with pytest.raises(Failed, match="run `camshaft export") as download:
        loaded.call("save_weights_external", path="download", age_encryption_recipients=["age1"])
    for number, error in enumerate((caught, download)):
        command = str(error.value).partition("`camshaft ")[2].partition("`")[0]
        subprocess.run(
            f"{sys.executable} -m camshaft {command.replace('OUTPUT', str(tmp_path / str(number)))}",
            shell=True,
            check=True,
            capture_output=True,
        )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    client.post("save_weights_external", 422, model_id=model.identifier, path="x")


def test_a_name_changes_while_weights_are_being_saved(server: RunningServer) -> None:
    client = server.client()
    model = client.create_model()
    for name in ("a", "b"):
        model.wait(model.command("save_weights", model.next(), path=name))
    url = f"training_runs/{model.identifier}/checkpoints/weights"
    with ThreadPoolExecutor(2) as pool, server.service.checkpoints.lock:  # which a save holds
        deleted = pool.submit(client.request, f"{url}/a", method="DELETE")
        expiring = pool.submit(client.request, f"{url}/b/ttl", b'{"ttl_seconds": 100}', method="PUT")
        assert [each.result(30)[0] for each in (deleted, expiring)] == [200, 200]
    (row,) = get(client, f"training_runs/{model.identifier}/checkpoints")["checkpoints"]
    assert row["expires_at"] is not None


@pytest.mark.parametrize("value", [0, -5])
def test_a_time_to_live_is_above_zero(client: Client, value: int) -> None:
    model = client.create_model()
    model.wait(model.command("save_weights", 1, path="a"))
    url = f"training_runs/{model.identifier}/checkpoints/weights/a/ttl"
    assert client.request(url, json.dumps({"ttl_seconds": value}).encode(), method="PUT")[0] == 422


# -- sessions, keys, limits, crashes ------------------------------------------------------------------


def test_a_finished_session_saves_its_models_under_last(server: RunningServer) -> None:
    client = server.client()
    model = client.create_model()
    model.train(1, DATA)
    model.wait(model.step(2))
    after = model.log_probs(3, DATA)
    server.finish()
    assert client.request("session_heartbeat", json.dumps({"session_id": client.session}).encode())[0] == 410
    other = server.client()
    body = {"session_id": other.session, "model_seq_id": 0, "path": f"tinker://{model.identifier}/weights/last"}
    promise = other.post("load_weights", **body)
    other.wait(promise)
    assert type(model)(other, promise["model_id"]).log_probs(1, DATA) == after


def test_base_models_that_are_not_served_are_refused_with_those_that_are(client: Client) -> None:
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B"}
    detail = client.post("create_model", 422, **body)["detail"]
    assert "the base model Qwen/Qwen3-8B is not served; this server has tiny" in detail


def test_more_models_than_the_limit_are_refused(client: Client) -> None:
    for number in range(3):
        client.create_model(number)
    body = {"session_id": client.session, "model_seq_id": 3, "base_model": "tiny"}
    assert "max_models=3" in client.post("create_model", 422, **body)["detail"]


@pytest.mark.parametrize("key", ["", "tml-foreign", "tml-"])
def test_a_foreign_key_is_refused_everywhere(server: RunningServer, key: str) -> None:
    stranger = Client(server.url, key, BASE)
    for path in ("create_session", "retrieve_future", "asample", "client/config", "none"):
        status, content = stranger.request(path, b"{}")
        assert status == 401
        assert server.key.encode() not in content


def test_a_host_header_of_another_machine_is_refused(client: Client) -> None:
    assert client.request("client/config", b"{}", Host="evil.example:80")[0] == 403


def test_pending_results_are_asked_for_again(client: Client, server: RunningServer) -> None:
    model = client.create_model()
    promise = model.train(2, DATA)  # waits for command 1
    app_status, content = 0, b""
    future = server.service.futures.find(promise["request_id"])
    assert future is not None
    assert future.wait(0.01) is None
    model.train(1, DATA)
    app_status, content = client.request("retrieve_future", json.dumps({"request_id": promise["request_id"]}).encode())
    assert app_status == 200
    assert client.request("retrieve_future", json.dumps({"request_id": promise["request_id"]}).encode()) == (
        200,
        content,
    )


def kill_worker(server: RunningServer) -> None:
    pool = server.role._pool
    assert isinstance(pool, ProcessPool)
    pid = pool.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_models_and_samplers_survive_the_death_of_the_worker(server: RunningServer) -> None:
    client = server.client()
    killed, undisturbed = client.create_model(0), client.create_model(1)
    for model in (killed, undisturbed):
        model.train(1, DATA)
        model.step(2)
        model.train(3, DATA)
        model.wait(model.train(4, DATA, forward_only=True))
    sampler = killed.wait(killed.command("save_weights_for_sampler", 5, sampling_session_seq_id=0))
    rows = client.sample(sampler["sampling_session_id"], 0, [5, 6], 3, seed=1)
    kill_worker(server)
    assert [row[0] for row in client.sample(sampler["sampling_session_id"], 1, [5, 6], 3, seed=1)] == [
        row[0] for row in rows
    ]
    assert killed.wait(killed.step(6)) == undisturbed.wait(undisturbed.step(5))
    assert killed.log_probs(7, DATA) == undisturbed.log_probs(6, DATA)


def test_silent_sessions_end_and_their_models_are_saved(tmp_path: Path) -> None:
    with running_server(tmp_path, session_timeout=1.0, max_models=1) as server:
        client = server.client()
        model = client.create_model()
        model.train(1, DATA)
        model.wait(model.step(2))
        info = json.dumps({"model_id": model.identifier}).encode()
        while client.request("get_info", info)[0] == 200:
            time.sleep(1.5)  # longer than the time limit of a session, which each request extends
        assert client.request("get_info", info)[0] == 410
        other = server.client()
        other.create_model()
    saved = tmp_path / "served" / client.session / "0" / "weights" / "last.json"
    assert json.loads(saved.read_text())["record"]["by_server"] is True
