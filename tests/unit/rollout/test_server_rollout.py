"""The server rollout without vLLM: HTTP client, options, and replies of a faulty server."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.fake_servers import HANG_UP, fake_server
from support.forked_python import fork_python
from support.processes import still_running
from support.tiny import tiny_folder

from camshaft import subprocesses
from camshaft.config import RolloutEngineConfig
from camshaft.config.schema.rollouts import ServerOptions
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams, build_rollout
from camshaft.rollout.server import launch
from camshaft.rollout.server.client import ServerClient
from camshaft.rollout.server.http_client import HTTPClient
from camshaft.rollout.server.launch import ServerProcess, command_line_options
from camshaft.rollout.vllm.guard import KeyGuard
from camshaft.subprocesses import Limit, is_running

STATE = {"identity": "a", "version": None, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
         "max_model_len": 1024, "dtype": "float32", "device": ""}  # fmt: skip
GOOD = {
    "prompt_token_ids": [5, 6], "token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.0, -2.0]},
    "finish_reason": "length",
}  # fmt: skip
LIMIT = Limit(10.0, "the limit of a test")
PROMPTS = Ragged.from_rows([[5, 6]], torch.int64)


def config(**engine_kwargs: Any) -> RolloutEngineConfig:
    return RolloutEngineConfig(model_path=str(tiny_folder()), engine_kwargs=engine_kwargs)


def unused_url() -> str:
    """Return a URL without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


# -- HTTP client ---------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [(503, {}), (500, {"error": "out of luck"}), (HANG_UP, None)])
def test_temporary_failure_is_retried(failure: tuple[int, Any]) -> None:
    script = [failure, failure, (200, {"ok": 1})]
    with fake_server(lambda path, body: script.pop(0)) as fake:
        http = HTTPClient(fake.url, LIMIT, 5)
        with http.connection() as connection:
            assert connection.request("POST", "/v1/completions", {}) == {"ok": 1}
    assert (http.retries, len(fake.paths)) == (2, 3)


@pytest.mark.alone
def test_permanent_failure_names_the_url() -> None:
    with fake_server(lambda path, body: (500, {"error": "out of luck"})) as fake:
        http = HTTPClient(fake.url, LIMIT, 2.0)
        message = rf"{fake.url} answered /v1/completions with HTTP 500: .*out of luck"
        with pytest.raises(RolloutError, match=message), http.connection() as connection:
            connection.request("POST", "/v1/completions", {})
    assert len(fake.paths) > 1


def test_client_error_is_not_retried() -> None:
    with fake_server(lambda path, body: (400, {"error": "no such thing"})) as fake:
        with (
            pytest.raises(RolloutError, match=r"HTTP 400: .*no such thing"),
            HTTPClient(fake.url, LIMIT, 5).connection() as connection,
        ):
            connection.request("POST", "/v1/completions", {})
        assert len(fake.paths) == 1


def test_state_changing_request_is_sent_once() -> None:
    with fake_server(lambda path, body: (HANG_UP, None)) as fake:
        with pytest.raises(RolloutError, match="did not answer /collective_rpc"):
            HTTPClient(fake.url, LIMIT, 5).post_once("/collective_rpc", {})
        assert len(fake.paths) == 1


def test_late_reply_is_an_error() -> None:
    with fake_server(lambda path, body: (time.sleep(1), (200, {}))[1]) as fake:
        message = rf"/slow: no answer from the server at {fake.url} for 0.* increase the limit engine_kwargs.timeout"
        with pytest.raises(RolloutError, match=message):
            HTTPClient(fake.url, Limit(0.2, "engine_kwargs.timeout"), 5).request("POST", "/slow", {})
        assert len(fake.paths) == 1


SERVER = """
import time
from support.fake_servers import fake_server
from unit.rollout.test_server_rollout import GOOD, serving
with fake_server(serving(lambda: (200, {"choices": [GOOD]}), version="mine")) as fake:
    print(fake.url, flush=True)
    time.sleep(100)
"""


@pytest.mark.alone
@pytest.mark.parametrize(
    "engine_kwargs",
    [
        pytest.param({"timeout": 2.0}, id="key of the rollout"),
        pytest.param({}, id="limit of the run", marks=pytest.mark.slow),
    ],
)
def test_server_that_stops_answering_is_named(
    engine_kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.5)
    monkeypatch.setattr(subprocesses.Wait, "longest", {})
    server = fork_python(["-c", SERVER], stdout=subprocess.PIPE)
    limit = Limit(1e9 if engine_kwargs else 2.0, "trainer.worker_timeout=2")
    setting = "engine_kwargs.timeout=2" if engine_kwargs else "trainer.worker_timeout=2"
    try:
        assert server.stdout is not None
        url = server.stdout.readline().decode().strip()
        rollout: Any = build_rollout("server", config(vllm_server_base_url=url, **engine_kwargs))
        rollout._loaded_version = "mine"
        with subprocesses.limit_waits(limit):
            rollout.generate_sequences(PROMPTS, SamplingParams(max_tokens=2), torch.zeros(1, dtype=torch.int64))
        server.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        message = f"no answer from the server at {url} for 2.* increase the limit {setting}"
        with pytest.raises(RolloutError, match=message), subprocesses.limit_waits(limit):
            rollout.generate_sequences(PROMPTS, SamplingParams(max_tokens=2), torch.zeros(1, dtype=torch.int64))
        assert time.monotonic() - begin >= 2
        assert any(f"no answer from the server at {url} for" in record.getMessage() for record in caplog.records)
    finally:
        server.kill()
        server.wait()


def rollout_with_weights(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Return a rollout whose fake server counts as having its weights."""
    rollout: Any = build_rollout("server", config(**options))
    rollout._loaded_version = "mine"
    monkeypatch.setattr(rollout._client, "check_version", lambda version: None)
    return rollout


def test_server_that_holds_back_responses_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.3)
    monkeypatch.setattr(subprocesses.Wait, "longest", {})
    with fake_server(serving(lambda: (time.sleep(3), (200, {"choices": [GOOD]}))[1])) as fake:
        rollout = rollout_with_weights(monkeypatch, vllm_server_base_url=fake.url, timeout=1.0)
        with pytest.raises(RolloutError, match=rf"no answer from the server at {fake.url} \(0 of 1 responses\) for 1"):
            rollout.generate_sequences(PROMPTS, SamplingParams(max_tokens=2), torch.zeros(1, dtype=torch.int64))
    assert "/v1/completions: no answer from the server" in caplog.records[-1].getMessage()


@pytest.mark.alone
def test_later_calls_expect_gaps_of_the_same_length(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subprocesses, "REPORT_SECONDS", 0.3)
    monkeypatch.setattr(subprocesses.Wait, "longest", {})
    with fake_server(serving(lambda: (time.sleep(0.8), (200, {"choices": [GOOD]}))[1])) as fake:
        rollout = rollout_with_weights(monkeypatch, vllm_server_base_url=fake.url)
        for is_first in (True, False):
            caplog.clear()
            rollout.generate_sequences(PROMPTS, SamplingParams(max_tokens=2), torch.zeros(1, dtype=torch.int64))
            assert bool(caplog.records) == is_first


@pytest.mark.parametrize("status", [401, 404])
def test_a_rejected_health_request_is_an_error_at_once(status: int) -> None:
    with fake_server(lambda path, body: (status, {})) as fake:
        with pytest.raises(RolloutError, match=f"answered /health with HTTP {status}"):
            build_rollout("server", config(vllm_server_base_url=fake.url))
        assert fake.paths == ["/health"]


def test_unreachable_url_times_out() -> None:
    url = unused_url()
    message = rf"no server is ready at vllm_server_base_url={url} after 0.5 s \(vllm_server_timeout\)"
    with pytest.raises(RolloutError, match=message):
        build_rollout("server", config(vllm_server_base_url=url, vllm_server_timeout=0.5))


# -- faulty servers -------------------------------------------------------------------------------


def serving(completion: Callable[[], tuple[int, Any]], **state: Any) -> Callable[[str, Any], tuple[int, Any]]:
    """Return a handler of a compatible server that replies to prompts with `completion`."""

    def answers(path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny"}]}
        if path == "/collective_rpc":
            return 200, {"results": [{"result": STATE | state}]}
        return completion() if path == "/v1/completions" else (200, {})

    return answers


def with_weights(url: str) -> Any:
    """Return a rollout whose weights are on the server."""
    rollout: Any = build_rollout("server", config(vllm_server_base_url=url, retry_timeout=0.5))
    rollout._loaded_version = STATE["version"] or "mine"
    return rollout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_token_ids": [5, 7]}, "for another prompt"),
        ({"token_ids": [7]}, "1 tokens and 2 log-probs"),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "with 0 tokens"),
        ({"token_ids": [7] * 5, "logprobs": {"token_logprobs": [-1.0] * 5}}, "a limit of 4 with 5 tokens"),
        ({"finish_reason": "abort"}, "aborted a response"),
        ({"logprobs": None}, "without token ids and log-probs"),
        ({"logprobs": {"token_logprobs": [-1.0, None]}}, "not finite for row 0"),
    ],
)
def test_reply_that_does_not_fit_the_request_is_rejected(change: dict[str, Any], message: str) -> None:
    answers = serving(lambda: (200, {"choices": [GOOD | change]}), version="mine")
    with fake_server(answers) as fake, pytest.raises(RolloutError, match=message):
        with_weights(fake.url).generate_sequences(PROMPTS, SamplingParams(4))


def test_valid_reply_is_returned() -> None:
    with fake_server(serving(lambda: (200, {"choices": [GOOD]}), version="mine")) as fake:
        out = with_weights(fake.url).generate_sequences(PROMPTS, SamplingParams(4))
    assert out.responses.values.tolist() == [7, 8]
    assert out.log_probs.values.tolist() == [-1.0, -2.0]
    assert not out.finished.any()


def test_a_continued_row_is_a_longer_prompt_with_another_seed() -> None:
    bodies: list[Any] = []

    def reply(path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/completions":
            bodies.append(body)
        answer = GOOD | {"prompt_token_ids": body["prompt"]} if path == "/v1/completions" else GOOD
        return serving(lambda: (200, {"choices": [answer]}), version="mine")(path, body)

    seeds = torch.tensor([3])
    with fake_server(reply) as fake:
        rollout = with_weights(fake.url)
        rollout.generate_sequences(PROMPTS, SamplingParams(5), seeds)
        generated = Ragged.from_rows([[7, 8, 9]], torch.int64)
        out = rollout.generate_sequences(PROMPTS, SamplingParams(5), seeds, generated)
        ended = rollout.generate_sequences(PROMPTS, SamplingParams(3), seeds, generated)
        with pytest.raises(RolloutError, match="ServerRollout cannot continue rows with presence_penalty=1"):
            rollout.generate_sequences(PROMPTS, SamplingParams(5, presence_penalty=1), seeds, generated)
    assert [(body["prompt"], body["max_tokens"]) for body in bodies] == [([5, 6], 5), ([5, 6, 7, 8, 9], 2)]
    assert bodies[0]["seed"] != bodies[1]["seed"]
    assert min(body["seed"] for body in bodies) >= 0
    assert out.responses.values.tolist() == [7, 8]
    assert ended.responses.lengths.tolist() == [0]


def test_server_with_other_weights_is_rejected() -> None:
    with fake_server(serving(lambda: (200, {"choices": [GOOD]}), version="theirs")) as fake:
        with pytest.raises(RolloutError, match="holds the weights of theirs, not those of mine"):
            with_weights(fake.url).generate_sequences(PROMPTS, SamplingParams(4))
        assert "/v1/completions" not in fake.paths


def test_responses_of_a_restarted_server_are_rejected() -> None:
    state: dict[str, Any] = {"version": "mine"}

    def restarted() -> tuple[int, Any]:
        state["identity"] = "b"
        return 200, {"choices": [GOOD]}

    with fake_server(lambda path, body: serving(restarted, **state)(path, body)) as fake:
        with pytest.raises(RolloutError, match="was restarted"):
            with_weights(fake.url).generate_sequences(PROMPTS, SamplingParams(4))
        assert "/v1/completions" in fake.paths


def test_first_failed_row_cancels_the_others() -> None:
    prompts = Ragged.from_rows([[5, 6]] * 400, torch.int64)
    with fake_server(serving(lambda: (400, {}), version="mine")) as fake:
        with pytest.raises(RolloutError, match="HTTP 400"):
            with_weights(fake.url).generate_sequences(prompts, SamplingParams(4))
        assert fake.paths.count("/v1/completions") < 300


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode is raw_logprobs, not processed_logprobs"),
        ({"generation_config": "auto"}, "--generation-config is auto, not vllm"),
        ({"dtype": "bfloat16"}, "--dtype is bfloat16, not float32"),
        ({"max_model_len": 512}, "--max-model-len is 512, less than 1024"),
    ],
)
def test_incompatible_server_error_shows_the_command(state: dict[str, Any], message: str) -> None:
    with fake_server(serving(lambda: (200, {}), **state)) as fake, pytest.raises(RolloutError, match=message) as error:
        build_rollout("server", config(vllm_server_base_url=fake.url))
    assert f"VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model {tiny_folder()}" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
        ((500, {"error": "'CPUWorker' object has no attribute 'camshaft'"}), "--worker-extension-cls camshaft"),
    ],
)
def test_server_without_weight_updates_is_rejected(answer: tuple[int, Any], message: str) -> None:
    def answers(path: str, body: Any) -> tuple[int, Any]:
        return (200, {"data": [{"id": "tiny"}]}) if path in ("/health", "/v1/models") else answer

    with fake_server(answers) as fake, pytest.raises(RolloutError, match=message):
        build_rollout("server", config(vllm_server_base_url=fake.url, retry_timeout=0))


def test_the_error_of_a_weight_sync_precedes_that_of_the_resumed_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerClient, "_send", Mock(side_effect=RolloutError("no weight 'sideways'")))
    answers = serving(lambda: (200, {}))
    with fake_server(lambda path, body: (500, {}) if path == "/resume" else answers(path, body)) as fake:
        client = ServerClient(HTTPClient(fake.url, LIMIT, 0), config(), None)
        with pytest.raises(RolloutError, match="no weight 'sideways'") as exc_info:
            client.send_weights(Mock(), (), "1")
    assert fake.paths[-1] == "/resume"
    assert exc_info.value.__notes__[0].startswith("Resuming the server also failed: ")


def test_other_http_server_is_rejected() -> None:
    with fake_server(lambda path, body: (200, {})) as fake, pytest.raises(RolloutError, match="serves no model"):
        build_rollout("server", config(vllm_server_base_url=fake.url))


# -- the key ---------------------------------------------------------------------------------------


def guarded_status(scope: dict[str, Any], key: str | None) -> int | str:
    """Return the HTTP status with which the guarded application answers, or the type of its first message."""
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Any:
        raise AssertionError("the guard reads no request body")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if key is None else [(b"authorization", key.encode())]
    asyncio.run(KeyGuard(application)({"headers": headers, **scope}, receive, send))
    return sent[0].get("status", sent[0]["type"])


@pytest.mark.parametrize("path", ["/v1/completions", "/collective_rpc", "/sleep", "/health", "/", "//v1/models"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_every_request_requires_the_key(path: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    scope = {"type": "http", "path": path, "method": method}
    assert guarded_status(scope, "Bearer secret") == 200
    assert [guarded_status(scope, key) for key in (None, "secret", "Bearer secre", "Bearer ", "")] == [401] * 5
    assert guarded_status({"type": "websocket", "path": path}, None) == "websocket.close"
    assert guarded_status({"type": "lifespan"}, None) == 200


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RolloutError, match="VLLM_API_KEY is not set"):
        KeyGuard(lambda scope, receive, send: receive())


def test_requests_have_the_key_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server(lambda path, body: (200, {})) as fake:
        for environment, key in (("", None), ("user", None), ("user", "own")):
            monkeypatch.setenv("VLLM_API_KEY", environment)
            HTTPClient(fake.url, LIMIT, 0, key=key).request("GET", "/health")
    assert fake.keys == [None, "Bearer user", "Bearer own"]


def test_a_rejected_key_names_the_variable() -> None:
    with fake_server(lambda path, body: (401, {})) as fake, pytest.raises(RolloutError, match=r"401.*set VLLM_API_KEY"):
        HTTPClient(fake.url, LIMIT, 0).request("GET", "/v1/models")


def test_a_started_server_gets_the_key_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[list[str], dict[str, str]]] = []

    def start_python(arguments: list[str], env: dict[str, str], **options: Any) -> Any:
        commands.append((arguments, env))
        raise InterruptedError

    monkeypatch.setattr(launch, "start_python", start_python)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: name)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            ServerProcess(config(), {})
    (arguments, environment), (_, other) = commands
    key = environment["VLLM_API_KEY"]
    assert len(key) > 30
    assert key != other["VLLM_API_KEY"]
    assert not any(key in argument for argument in arguments)
    assert arguments[-2:] == ["--middleware", "camshaft.rollout.vllm.guard.KeyGuard"]
    with pytest.raises(RolloutError, match="engine_kwargs sets api_key"):
        ServerProcess(config(), {"api_key": "visible to all users of the machine"})


def test_a_server_without_a_guard_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as server:
        monkeypatch.setattr(launch, "start_python", lambda *_, **__: server)
        monkeypatch.setattr(launch, "GroupGuard", Mock(side_effect=BlockingIOError))
        monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: name)
        with pytest.raises(BlockingIOError):
            ServerProcess(config(), {})
        assert server.returncode == -signal.SIGKILL


# -- options and starting -------------------------------------------------------------------------


def test_options_of_camshaft_and_vllm_are_separated() -> None:
    options = ServerOptions.from_dict({"vllm_server_timeout": 9, "swap_space": 2}, world_size=2)
    assert (options.vllm_server_timeout, options.arguments) == (9.0, {"swap_space": 2})
    assert ServerOptions.from_dict({"vllm_server_base_url": "http://a:1/v1/"}, 1).vllm_server_base_url == (
        "http://a:1",
    )


@pytest.mark.parametrize(
    ("engine_kwargs", "message"),
    [
        ({"vllm_server_base_url": "10.0.0.7:8000"}, "write it as http://127.0.0.1:8000"),
        ({"vllm_server_base_url": ["http://a:1"]}, "lists 1 server for 2 ranks"),
        ({"vllm_server_base_url": ["http://a:1", "http://a:1/"]}, "listed twice"),
        (
            {"vllm_server_base_url": ["http://a:1", "http://b:1"], "swap_space": 2},
            "swap_space: arguments of a server that camshaft starts",
        ),
        ({"vllm_server_timeout": 0}, "vllm_server_timeout: .*greater than 0"),
        ({"weight_transfer": "pigeon"}, "weight_transfer: .*'broadcast' or 'device_broadcast'"),
    ],
)
def test_invalid_options_are_rejected(engine_kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerOptions.from_dict(engine_kwargs, world_size=2)
    with pytest.raises(RolloutError, match="engine_kwargs: "):
        build_rollout("server", config(vllm_server_base_url="nowhere"))


def test_command_line_follows_the_config() -> None:
    options = command_line_options(
        config().model_copy(update={"enable_prefix_caching": False}), {"swap_space": 2, "flag": True}
    )
    pairs = dict(itertools.pairwise(options))
    assert pairs["--model"] == str(tiny_folder())
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert (pairs["--max-model-len"], pairs["--swap-space"]) == ("1024", "2")
    assert {"--no-enable-prefix-caching", "--flag", "--enforce-eager"} <= set(options)
    with pytest.raises(RolloutError, match="engine_kwargs sets logprobs_mode"):
        command_line_options(config(), {"logprobs_mode": "raw_logprobs"})


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)


@pytest.mark.usefixtures("without_vllm")
def test_missing_vllm_is_an_error() -> None:
    with pytest.raises(RolloutError, match=r"rollout.name=server requires vLLM .* not installed: run pip install"):
        ServerProcess(config(), {})


def guarded(*code: str) -> subprocess.Popen[bytes]:
    """Start a trainer that starts a server and its guard; the server prints its process id."""
    server = ["-c", "import os, time; print(os.getpid(), flush=True); " + code[0]]
    trainer = (
        "import sys, time; from camshaft.subprocesses import GroupGuard, start_python; "
        "guard = GroupGuard(start_python(sys.argv[1:]).pid); time.sleep(600)"
    )
    return subprocess.Popen([sys.executable, "-c", trainer, *server], stdout=subprocess.PIPE)


def test_server_ends_with_a_killed_trainer() -> None:
    with guarded("time.sleep(600)") as trainer:
        assert trainer.stdout is not None
        server = int(trainer.stdout.readline())
        assert is_running(server)
        os.kill(trainer.pid, signal.SIGKILL)
    assert not still_running([server], seconds=10)
