"""Rules about sessions, keys, fields, statuses and polls. `suite.py` lists them."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

from camshaft.contracts.rules import NotClaimed, expect
from camshaft.contracts.tinker.client import SDK_VERSION, Client, read_output, training_request
from camshaft.contracts.tinker.harness import TinkerHarness, expect_failure, messages
from camshaft.contracts.tinker.proxy import Fault, FaultProxy, first

POLLS = 4
"""Number of polls of one promise at the same time."""


def handshake(harness: TinkerHarness) -> None:
    """The requests with which the SDK begins are answered, also if it repeats them: flags, session, heartbeat and
    capabilities, which contain the base model."""
    client = harness.client()
    for _ in range(2):
        flags = client.post("client/config", sdk_version=SDK_VERSION)
        expect(isinstance(flags, dict), f"client/config has no flags: {flags}")
        expect(not flags.get("pjwt_auth_enabled"), "client/config asks for tokens of the hosted service")
        status, _ = client.request("client/dynamic_config", json.dumps({"sdk_version": SDK_VERSION}).encode())
        expect(status in (200, 404), f"client/dynamic_config was answered with the status {status}")
        client.post("session_heartbeat", session_id=client.session)
        models = client.call("GET", "get_server_capabilities")["supported_models"]
        names = [model["model_name"] for model in models]
        expect(harness.target.base in names, f"the capabilities do not contain {harness.target.base}: {names}")
    expect(harness.client().session != client.session, "two sessions have the same id")


def requests_tolerate_lost_answers(harness: TinkerHarness) -> None:
    """A client that creates a session and a model while each first answer is lost gets a usable model."""
    rows = harness.rows()
    for path in ("create_session", "create_model", "get_info", "retrieve_future"):
        with FaultProxy(harness.target.url, first(path, Fault.LOSE_ANSWER)) as proxy:
            client = harness.client(proxy.url)
            model = client.create_model(rank=8)
            info = client.post("get_info", model_id=model.identifier)
            expect(info["model_data"]["model_name"] == harness.target.base, f"get_info has another model: {info}")
            harness.expect_close(
                model.forward(messages(rows)), harness.oracle().values(rows), f"the log-probs after a lost {path}"
            )
            harness.finish()


def unknown_fields_are_ignored(harness: TinkerHarness) -> None:
    """A JSON field that the server does not know is ignored, because newer SDKs send new ones."""
    client = harness.client()
    client.post("client/config", sdk_version=SDK_VERSION, future_field=1)
    client.post("create_session", tags=[], sdk_version=SDK_VERSION, future_field={"a": [1]})
    client.post("session_heartbeat", session_id=client.session, future_field=None)
    model = client.create_model(future_field=True)
    model.run(messages(harness.rows()))
    adam = {"learning_rate": 1e-4, "future_field": 0.5}
    model.call("optim_step", adam_params=adam, future_field="x")


def missing_fields_are_named(harness: TinkerHarness) -> None:
    """A request without a required field is refused with a final status and the name of the field."""
    client = harness.client()
    for route, body, missing in (
        ("create_model", {"session_id": client.session, "model_seq_id": 0}, "base_model"),
        ("asample", {"sampling_session_id": "x", "seq_id": 1, "sampling_params": {}}, "prompt"),
        ("retrieve_future", {}, "request_id"),
    ):
        expect_failure(lambda route=route, body=body: client.post(route, **body), f"{route} is accepted", missing)


def newer_loss_options_win(harness: TinkerHarness) -> None:
    """Of the two fields for options of a loss, the values of the newer one (loss_fn_config_v2) are used."""
    rows = harness.rl_rows()
    model = harness.model(rank=8)
    request = training_request(model.identifier, model.next(), messages(rows), "ppo", forward_only=True)
    for name, new in (("clip_low_threshold", 0.99), ("clip_high_threshold", 1.01)):
        request.loss_fn_config[name] = 1.0
        request.loss_fn_config_v2[name].number = new
    _, value = read_output(model.wait(model.send(request)))
    expected = harness.oracle().train(rows, "ppo", clip_low_threshold=0.99, clip_high_threshold=1.01)
    harness.expect_loss(value, expected, "loss:sum with the newer options")


def foreign_keys_are_refused(harness: TinkerHarness) -> None:
    """A missing or unknown key is answered with 401 everywhere, also for promises and models of others."""
    client = harness.client()
    model = client.create_model()
    promise = model.train(model.next(), messages(harness.rows()))
    routes = {
        "create_session": {"tags": [], "sdk_version": SDK_VERSION},
        "session_heartbeat": {"session_id": client.session},
        "get_info": {"model_id": model.identifier},
        "retrieve_future": {"request_id": promise["request_id"]},
        "optim_step": {"model_id": model.identifier, "seq_id": 2, "adam_params": {}},
    }
    for key in ("", "tml-unknown", client.key[:-1]):
        other = Client(client.url, key, client.base)
        for route, body in routes.items():
            status, content = other.request(route, json.dumps(body).encode())
            expect(status == 401, f"{route} with the key '{key[:8]}...' was answered with the status {status}")
            expect(client.session.encode() not in content, f"the answer to a foreign key has the session: {content}")
    model.wait(promise)


def keys_separate_users(harness: TinkerHarness) -> None:
    """Sessions, models, promises and saved weights of one key are not accessible with the key of another user."""
    if harness.target.other_key is None:
        raise NotClaimed("the suite was started without other_key=")
    client = harness.client()
    model = client.create_model()
    promise = model.train(model.next(), messages(harness.rows()))
    model.wait(promise)
    model.update()
    path = model.call("save_weights", path="private")["path"]
    other = Client(client.url, harness.target.other_key, client.base).open()
    for route, body in (
        ("session_heartbeat", {"session_id": client.session}),
        ("get_info", {"model_id": model.identifier}),
        ("retrieve_future", {"request_id": promise["request_id"]}),
        ("optim_step", {"model_id": model.identifier, "seq_id": 3, "adam_params": {}}),
        ("weights_info", {"tinker_path": path}),
    ):
        status, _ = other.request(route, json.dumps(body).encode())
        expect(status in (401, 403, 404, 410), f"{route} with another key was answered with the status {status}")
    expect_failure(lambda: other.load_model(0, path), "another key has loaded the saved weights")
    other.finish()


def ids_have_the_form_of_the_sdk(harness: TinkerHarness) -> None:
    """Ids of models and paths of saved weights have the form that the SDK computes itself."""
    client = harness.client()
    for number in (0, 7):
        body = {"session_id": client.session, "model_seq_id": number, "base_model": client.base}
        promise = client.post("create_model", **body, lora_config={"rank": 4})
        expected = f"{client.session}:train:{number}"
        result = client.wait(promise)
        expect(result["model_id"] == expected, f"the model has the id {result['model_id']}, expected {expected}")
        expect(promise.get("model_id") in (None, expected), f"the promise has the model id {promise.get('model_id')}")
        if number == 0:
            command = {"model_id": expected, "seq_id": 1, "path": "form"}
            path = client.wait(client.post("save_weights", **command))["path"]
            expect(path == f"tinker://{expected}/weights/form", f"the saved weights have the path {path}")


def polls_end_in_time(harness: TinkerHarness) -> None:
    """A poll of a pending promise is answered within the time limit of the SDK with try_again (status 408 or 200), and
    so are several polls of one promise."""
    model = harness.model(rank=8)
    promise = model.step(2)  # waits for command 1
    begin = time.monotonic()
    with ThreadPoolExecutor(POLLS) as pool:
        answers = list(pool.map(lambda _: (model.client.poll(promise), time.monotonic() - begin), range(POLLS)))
    for (status, content), seconds in answers:
        expect(seconds < harness.target.poll_limit, f"a poll of a pending promise took {seconds:.0f} s")
        body = json.loads(content)
        if "error" in body and seconds > harness.target.gap_timeout / 2:
            return  # the server gave up waiting for command 1 before a poll ended
        what = f"the status {status} and {body}"
        is_pending = status in (200, 408) and body.get("type") == "try_again"
        expect(is_pending, f"a poll of a pending promise was answered with {what}")
    model.train(1, messages(harness.rows()))
    with ThreadPoolExecutor(POLLS) as pool:
        results = set(pool.map(lambda _: model.client.fetch(promise), range(POLLS)))
    expect(len(results) == 1, f"{POLLS} polls of one promise have {len(results)} different results")


def mistakes_are_final(harness: TinkerHarness) -> None:
    """A mistake of the client is answered with a status that the SDK does not repeat, and with a sentence; a command
    that fails is a result with an error, or answered with a final status."""
    client = harness.client()
    model = client.create_model()
    requests = (
        ("create_model", {"session_id": client.session, "model_seq_id": 3, "base_model": "no-such-model"}),
        ("optim_step", {"model_id": "no-such-session:train:0", "seq_id": 1, "adam_params": {}}),
        ("optim_step", {"model_id": model.identifier, "seq_id": -1, "adam_params": {}}),
        ("create_sampling_session", {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": "x"}),
        ("retrieve_future", {"request_id": "no-such-promise"}),
        ("load_weights", {"session_id": client.session, "model_seq_id": 4, "path": "tinker://a:train:0/weights/b"}),
    )
    for route, body in requests:
        sentence = expect_failure(
            lambda route=route, body=body: client.wait(client.post(route, **body)), f"{route} accepts {body}"
        )
        expect(len(sentence) > 10, f"{route} refuses {body} without a sentence: '{sentence}'")
    expect_failure(
        lambda: model.run(messages(harness.rows()), "no_such_loss"), "an unknown loss is accepted", "no_such_loss"
    )


CHECKS = (
    handshake,
    requests_tolerate_lost_answers,
    unknown_fields_are_ignored,
    missing_fields_are_named,
    newer_loss_options_win,
    foreign_keys_are_refused,
    keys_separate_users,
    ids_have_the_form_of_the_sdk,
    polls_end_in_time,
    mistakes_are_final,
)
