"""Numbers that no tensor, log or model can hold are refused before anything depends on them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.tinker_clients import Client, Failed, RunningServer, datum, read_samples, running_server

from camshaft.roles.served import ServedWorker

DATA = [datum([5, 6, 7, 8, 9])]
BIG = 2**63


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server"), worker=ServedWorker) as server:
        yield server


@pytest.fixture
def client(shared: RunningServer) -> Iterator[Client]:
    yield shared.client()
    shared.finish()
    assert shared.role.generation == 0  # the worker has not died
    assert shared.client().create_model().log_probs(1, DATA)
    shared.finish()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model_seq_id": -1}, "model_seq_id must be an integer from 0 to 999999999, got -1"),
        ({"model_seq_id": 10**9}, "model_seq_id must be an integer from 0 to 999999999, got 1000000000"),
        ({"lora_config": {"rank": 8, "seed": 2**70}}, "lora_config.seed must be an integer from -9223372036854775808"),
        ({"lora_config": {"rank": 10**7}}, "lora_config.rank=10000000 is not from 0, which trains all weights, to 64,"),
        ({"lora_config": {"rank": -1}}, "lora_config.rank=-1 is not from 0, which trains all weights, to 64,"),
    ],
)
def test_a_model_with_a_wrong_number_is_refused(client: Client, body: dict[str, Any], message: str) -> None:
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny", **body}
    assert message in client.post("create_model", 422, **body)["detail"]


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_each_seed_of_64_bits_is_accepted(client: Client, seed: int) -> None:
    body = {"session_id": client.session, "model_seq_id": 1, "base_model": "tiny"}
    client.wait(client.post("create_model", **body, lora_config={"rank": 8, "seed": seed}))


@pytest.mark.parametrize("number", [BIG, 10**30])
def test_a_number_of_more_than_64_bits_is_refused_everywhere(client: Client, number: int) -> None:
    model, sampler = client.create_model(1), client.sampler(0, base_model="tiny")
    assert "seq_id must be an integer" in model.step(number, 422)["detail"]
    sampling = {"session_id": client.session, "sampling_session_seq_id": number, "base_model": "tiny"}
    assert "sampling_session_seq_id" in client.post("create_sampling_session", 422, **sampling)["detail"]
    body = {"sampling_session_id": sampler, "seq_id": number, "sampling_params": {}, "prompt": {"chunks": []}}
    assert "seq_id must be an integer" in client.post("asample", 422, **body)["detail"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling_params": {"stop": [BIG]}}, r"sampling_params.stop[0] must be an integer from"),
        ({"target_prompt_logprobs": {"data": [BIG], "dtype": "int64"}}, "target_prompt_logprobs.data[0] must be"),
        ({"target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": [0, 10**30]}}, "logprobs.shape[1] must be"),
        ({"sampling_params": {"temperature": 10**400}}, "sampling_params.temperature must be a finite number"),
    ],
)
def test_a_request_for_samples_with_a_wrong_number_is_refused(
    client: Client, change: dict[str, Any], message: str
) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    sampler = client.sampler(0, base_model="tiny")
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    assert message in client.post("asample", 422, **{**body, **change})["detail"]
    assert len(read_samples(client.wait(client.post("asample", **body)))) == 1  # with the same number


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop": [112]}, r"sampling_params.stop contains the token id 112, but those of the model are 0..111"),
        ({"stop": [3, -1]}, r"sampling_params.stop contains the token id -1,"),
        ({"temperature": 1e-300}, "sampling_params.temperature=1e-300 is above 0 and below 1e-06; set it to 0"),
        ({"num_samples": 10**12}, "num_samples=1000000000000 is not from 1 to 1024; send several requests"),
    ],
)
def test_samples_with_a_number_beyond_the_model_fail(client: Client, change: dict[str, Any], message: str) -> None:
    with pytest.raises(Failed, match=message):
        client.sample(client.sampler(0, base_model="tiny"), 0, [5, 6], **change)


@pytest.mark.parametrize("change", [{"max_tokens": 2**62}, {"top_k": 2**62}, {"temperature": 1e-6}])
def test_samples_with_an_extreme_option_are_sampled(client: Client, change: dict[str, Any]) -> None:
    (sample,) = client.sample(client.sampler(0, base_model="tiny"), 0, [5, 6], **change)
    assert all(0 <= token < 112 for token in sample.tokens)


@pytest.mark.parametrize("seconds", [0, -5, 10**9 + 1, 10**12])
def test_a_time_to_live_has_limits(client: Client, seconds: int) -> None:
    model = client.create_model()
    for number, route in enumerate(("save_weights", "save_weights_for_sampler"), 1):
        with pytest.raises(Failed, match=f"ttl_seconds={seconds} is not from 1 to 1000000000"):
            model.wait(model.command(route, number, path="a", ttl_seconds=seconds))
    model.wait(model.command("save_weights", 3, path="a", ttl_seconds=10**9))
    url = f"training_runs/{model.identifier}/checkpoints/weights/a/ttl"
    status, content = client.request(url, json.dumps({"ttl_seconds": seconds}).encode(), method="PUT")
    assert status == 422
    assert b"ttl_seconds=%d is not from 1 to" % seconds in content
    assert client.request("checkpoints", method="GET")[0] == 200
