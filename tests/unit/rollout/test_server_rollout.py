"""vLLM's server as a generator, as far as it goes without vLLM: the http, the options, and a server that misbehaves."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_servers import HANG_UP, fake_server
from support.processes import running, still_running
from support.tiny import tiny_folder

from camshaft.config import RolloutEngineConfig
from camshaft.config.schema.server import ServerOptions
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams, build_rollout
from camshaft.rollout.server import guard
from camshaft.rollout.server.http_client import HTTPClient
from camshaft.rollout.server.launch import ServerProcess, command_line_options

STATE = {"identity": "a", "version": None, "logprobs_mode": "processed_logprobs", "generation_config": "vllm",
         "max_model_len": 1024, "dtype": "float32"}  # fmt: skip
GOOD = {
    "prompt_token_ids": [5, 6], "token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.0, -2.0]},
    "finish_reason": "length",
}  # fmt: skip
PROMPTS = Ragged.from_rows([[5, 6]], torch.int64)


def config(**own: Any) -> RolloutEngineConfig:
    return RolloutEngineConfig(model_path=str(tiny_folder()), engine_kwargs=own)


def nobody() -> str:
    """A url where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


# -- the http -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [(503, {}), (500, {"error": "out of luck"}), (HANG_UP, None)])
def test_trouble_that_passes_is_waited_for(trouble: tuple[int, Any]) -> None:
    script = [trouble, trouble, (200, {"ok": 1})]
    with fake_server(lambda path, body: script.pop(0)) as fake:
        http = HTTPClient(fake.url, 10, 5)
        with http.connection() as connection:
            assert connection.request("POST", "/v1/completions", {}) == {"ok": 1}
    assert (http.retries, len(fake.asked)) == (2, 3)


@pytest.mark.alone
def test_trouble_that_stays_is_an_error_that_names_the_url() -> None:
    with fake_server(lambda path, body: (500, {"error": "out of luck"})) as fake:
        http, begun = HTTPClient(fake.url, 10, 0.5), time.monotonic()
        told = rf"{fake.url} answered /v1/completions with HTTP 500: .*out of luck"
        with pytest.raises(RolloutError, match=told), http.connection() as connection:
            connection.request("POST", "/v1/completions", {})
    assert time.monotonic() - begun < 2
    assert 1 < len(fake.asked) < 6


def test_a_refusal_is_not_repeated() -> None:
    with fake_server(lambda path, body: (400, {"error": "no such thing"})) as fake:
        with (
            pytest.raises(RolloutError, match=r"HTTP 400: .*no such thing"),
            HTTPClient(fake.url, 10, 5).connection() as connection,
        ):
            connection.request("POST", "/v1/completions", {})
        assert len(fake.asked) == 1


def test_what_may_have_happened_is_not_asked_for_twice() -> None:
    with fake_server(lambda path, body: (HANG_UP, None)) as fake:
        with pytest.raises(RolloutError, match="did not answer /collective_rpc"):
            HTTPClient(fake.url, 10, 5).post_once("/collective_rpc", {})
        assert len(fake.asked) == 1


def test_an_answer_that_comes_too_late_is_an_error() -> None:
    with fake_server(lambda path, body: (time.sleep(1), (200, {}))[1]) as fake:
        with pytest.raises(RolloutError, match=r"not answered /slow for 0.2 s.*engine_kwargs.timeout"):
            HTTPClient(fake.url, 0.2, 5).request("POST", "/slow", {})
        assert len(fake.asked) == 1


def test_a_url_where_nobody_is_becomes_an_error_after_the_time_that_was_given() -> None:
    url, begun = nobody(), time.monotonic()
    told = rf"no server is ready at vllm_server_base_url={url} after 0.5 s \(vllm_server_timeout\)"
    with pytest.raises(RolloutError, match=told):
        build_rollout("server", config(vllm_server_base_url=url, vllm_server_timeout=0.5))
    assert time.monotonic() - begun < 30


# -- a server that misbehaves ---------------------------------------------------------------------


def serving(completion: Callable[[], tuple[int, Any]], **state: Any) -> Callable[[str, Any], tuple[int, Any]]:
    """A server that knows its words, and answers prompts with `completion`."""

    def answers(path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny"}]}
        if path == "/collective_rpc":
            return 200, {"results": [{"done": STATE | state}]}
        return completion() if path == "/v1/completions" else (200, {})

    return answers


def with_weights(url: str) -> Any:
    """A rollout that thinks the server has its weights."""
    rollout: Any = build_rollout("server", config(vllm_server_base_url=url, retry_timeout=0.5))
    rollout._holds = STATE["version"] or "mine"
    return rollout


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt_token_ids": [5, 7]}, "to another prompt"),
        ({"token_ids": [7]}, "1 tokens and 2 log-probs"),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "with 0 tokens"),
        ({"token_ids": [7] * 5, "logprobs": {"token_logprobs": [-1.0] * 5}}, "a limit of 4 with 5 tokens"),
        ({"finish_reason": "abort"}, "broke a response off"),
        ({"logprobs": None}, "does not answer as vLLM's server does"),
        ({"logprobs": {"token_logprobs": [-1.0, None]}}, "not finite for row 0"),
    ],
)
def test_an_answer_that_is_none_to_the_request_is_refused(change: dict[str, Any], told: str) -> None:
    answers = serving(lambda: (200, {"choices": [GOOD | change]}), version="mine")
    with fake_server(answers) as fake, pytest.raises(RolloutError, match=told):
        with_weights(fake.url).generate_sequences(PROMPTS, SamplingParams(4))


def test_a_good_answer_is_taken() -> None:
    with fake_server(serving(lambda: (200, {"choices": [GOOD]}), version="mine")) as fake:
        out = with_weights(fake.url).generate_sequences(PROMPTS, SamplingParams(4))
    assert out.responses.values.tolist() == [7, 8]
    assert out.log_probs.values.tolist() == [-1.0, -2.0]
    assert not out.finished.any()


def test_weights_of_somebody_else_generate_nothing() -> None:
    with fake_server(serving(lambda: (200, {"choices": [GOOD]}), version="theirs")) as fake:
        with pytest.raises(RolloutError, match="holds weights of theirs, not those of mine"):
            with_weights(fake.url).generate_sequences(PROMPTS, SamplingParams(4))
        assert "/v1/completions" not in fake.asked


def test_a_server_that_was_started_anew_in_between_has_said_nothing_that_counts() -> None:
    state: dict[str, Any] = {"version": "mine"}

    def restarted() -> tuple[int, Any]:
        state["identity"] = "b"
        return 200, {"choices": [GOOD]}

    with fake_server(lambda path, body: serving(restarted, **state)(path, body)) as fake:
        with pytest.raises(RolloutError, match="was started anew"):
            with_weights(fake.url).generate_sequences(PROMPTS, SamplingParams(4))
        assert "/v1/completions" in fake.asked


def test_the_first_row_that_fails_ends_the_others() -> None:
    prompts = Ragged.from_rows([[5, 6]] * 400, torch.int64)
    with fake_server(serving(lambda: (400, {}), version="mine")) as fake:
        with pytest.raises(RolloutError, match="HTTP 400"):
            with_weights(fake.url).generate_sequences(prompts, SamplingParams(4))
        assert fake.asked.count("/v1/completions") < 300


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode is raw_logprobs, not processed_logprobs"),
        ({"generation_config": "auto"}, "--generation-config is auto, not vllm"),
        ({"dtype": "bfloat16"}, "--dtype is bfloat16, not float32"),
        ({"max_model_len": 512}, "--max-model-len is 512, less than 1024"),
    ],
)
def test_a_server_that_would_answer_something_else_is_told_how_to_start(state: dict[str, Any], told: str) -> None:
    with fake_server(serving(lambda: (200, {}), **state)) as fake, pytest.raises(RolloutError, match=told) as error:
        build_rollout("server", config(vllm_server_base_url=fake.url))
    assert f"VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model {tiny_folder()}" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
        ((500, {"error": "'CPUWorker' object has no attribute 'camshaft'"}), "--worker-extension-cls camshaft"),
    ],
)
def test_a_server_that_takes_no_weights_is_told_what_it_lacks(answer: tuple[int, Any], told: str) -> None:
    def answers(path: str, body: Any) -> tuple[int, Any]:
        return (200, {"data": [{"id": "tiny"}]}) if path in ("/health", "/v1/models") else answer

    with fake_server(answers) as fake, pytest.raises(RolloutError, match=told):
        build_rollout("server", config(vllm_server_base_url=fake.url, retry_timeout=0))


def test_something_else_than_such_a_server_is_told_from_one() -> None:
    with fake_server(lambda path, body: (200, {})) as fake, pytest.raises(RolloutError, match="serves no model"):
        build_rollout("server", config(vllm_server_base_url=fake.url))


# -- options and starting -------------------------------------------------------------------------


def test_options_of_ours_and_of_vllm_are_told_apart() -> None:
    options = ServerOptions.of({"vllm_server_timeout": 9, "swap_space": 2}, ranks=2)
    assert (options.vllm_server_timeout, options.arguments) == (9.0, {"swap_space": 2})
    assert ServerOptions.of({"vllm_server_base_url": "http://a:1/v1/"}, 1).vllm_server_base_url == ("http://a:1",)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"vllm_server_base_url": "10.0.0.7:8000"}, "write it as http://127.0.0.1:8000"),
        ({"vllm_server_base_url": ["http://a:1"]}, "lists 1 server for 2 ranks"),
        ({"vllm_server_base_url": ["http://a:1", "http://a:1/"]}, "listed twice"),
        ({"vllm_server_base_url": ["http://a:1", "http://b:1"], "swap_space": 2}, "swap_space: these are for starting"),
        ({"vllm_server_timeout": 0}, "vllm_server_timeout: .*greater than 0"),
        ({"weight_transfer": "pigeon"}, "weight_transfer: .*'shared_memory' or 'broadcast'"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(own: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ServerOptions.of(own, ranks=2)
    with pytest.raises(RolloutError, match="engine_kwargs: "):
        build_rollout("server", config(vllm_server_base_url="nowhere"))


def test_a_server_is_started_with_what_the_config_says() -> None:
    words = command_line_options(
        config().model_copy(update={"enable_prefix_caching": False}), {"swap_space": 2, "flag": True}
    )
    pairs = dict(itertools.pairwise(words))
    assert pairs["--model"] == str(tiny_folder())
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert (pairs["--max-model-len"], pairs["--swap-space"]) == ("1024", "2")
    assert {"--no-enable-prefix-caching", "--flag", "--enforce-eager"} <= set(words)
    with pytest.raises(RolloutError, match="engine_kwargs sets logprobs_mode"):
        command_line_options(config(), {"logprobs_mode": "raw_logprobs"})


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)


@pytest.mark.usefixtures("without_vllm")
def test_without_vllm_a_server_is_not_started() -> None:
    with pytest.raises(RolloutError, match=r"rollout.name=server needs vLLM to start its server: pip install"):
        ServerProcess(config(), {})


def guarded(*code: str) -> subprocess.Popen[bytes]:
    """A trainer, which starts the guard, which starts a server; the server writes its number."""
    server = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); " + code[0]]
    trainer = (
        "import os, subprocess, sys, time; subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), "
        "*sys.argv[2:]], start_new_session=True); time.sleep(600)"
    )
    return subprocess.Popen([sys.executable, "-c", trainer, str(Path(guard.__file__)), *server], stdout=subprocess.PIPE)


def test_a_server_does_not_outlive_a_trainer_that_is_killed() -> None:
    with guarded("time.sleep(600)") as trainer:
        assert trainer.stdout is not None
        server = int(trainer.stdout.readline())
        assert running(server)
        os.kill(trainer.pid, signal.SIGKILL)
    assert not still_running([server], seconds=10)
