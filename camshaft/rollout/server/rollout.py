"""vLLM's own server as a generator: OpenAI's completions for tokens, and a few words more for weights.

    own = {"vllm_server_base_url": "http://127.0.0.1:8000"}        # left out: a server is started
    rollout = ServerRollout(RolloutEngineConfig(model_path="models/tiny", engine_kwargs=own))
    rollout.load_weights(engine.named_weights())
    rollout.generate_sequences(prompts, SamplingParams(max_tokens=64))

Each row is a request with its own seed, so many at once as the server computes together. Token ids go there and come
back; no text is on the way. Before the first and after the last, the server is asked whose weights it holds: one that
was started anew in between, or was given others, has generated nothing that counts.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.config.schema.server import ServerOptions
from camshaft.device import rank, world_size
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, SamplingParams
from camshaft.rollout.external import RowRequest, RowResponse
from camshaft.rollout.server.client import ServerClient
from camshaft.rollout.server.http_client import HTTPClient, RetryingConnection
from camshaft.rollout.server.launch import ServerProcess
from camshaft.rollout.vllm.base import BaseVLLMRollout

MOST_CONNECTIONS = 128
COMPLETIONS = "/v1/completions"


class ServerRollout(BaseVLLMRollout):
    """See the map above."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        try:
            options = ServerOptions.of(config.engine_kwargs, world_size())
        except ValueError as error:
            raise RolloutError(f"engine_kwargs: {error}") from error
        self._launched: ServerProcess | None = None
        self._name = secrets.token_hex(4)
        self._holds: str | None = None
        self.http = self._connect(options)
        self._client = ServerClient(self.http, config, options.weight_transfer)
        self._client.handshake()

    def _connect(self, options: ServerOptions) -> HTTPClient:
        """To the server, when it is ready."""
        if options.vllm_server_base_url:
            url = options.vllm_server_base_url[rank()]
            _wait_for(url, options.vllm_server_timeout)
            return HTTPClient(url, options.timeout, options.retry_timeout)
        if self.config.tensor_model_parallel_size > 1:
            raise RolloutError(
                f"tensor_model_parallel_size={self.config.tensor_model_parallel_size}: each rank starts a server on "
                "its own device; set it to 1, or start a larger one yourself and name it in vllm_server_base_url"
            )
        launched = self._launched = ServerProcess(self.config, options.arguments)
        weakref.finalize(self, launched.end)
        launched.wait(options.vllm_server_timeout)
        return HTTPClient(launched.url, options.timeout, options.retry_timeout, launched.ended)

    # -- weights --------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.ready_to_load()
        self._holds = None
        version = f"hand-over {self.weights_version} of {self._name}"
        self._client.send_weights(self.expected, weights, version)
        self._holds = version

    def weight_digests(self) -> Mapping[str, int]:
        """Recomputed in the server's workers."""
        return self._client.digests(self._version())

    def has_weights(self) -> bool:
        return self._holds is not None

    def _version(self) -> str:
        self.ready()
        assert self._holds is not None
        return self._holds

    # -- memory ---------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """A server that somebody else started keeps its memory; others may be using it."""
        if self._launched is not None and not self._asleep and self.config.free_cache_engine:
            self._client.sleep()
        self._asleep, self._holds = True, None

    def wake_up(self) -> None:
        if self._launched is not None and self._asleep and self.config.free_cache_engine:
            self._client.wake_up()
        self._asleep = False

    # -- tokens ---------------------------------------------------------------------------------------

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        start, retries = time.perf_counter(), self.http.retries
        requests = self.build_requests(prompts, sampling, seeds)
        if not requests:
            return Generation.empty(prompts)
        bodies = self._bodies(requests, sampling)
        version = self._version()
        self._client.check_version(version)
        answers = self._answers(requests, bodies)
        self._client.check_version(version)
        out = self.build_generation(prompts, answers, time.perf_counter() - start)
        out.metrics["http_retries"] = float(self.http.retries - retries)
        return out

    def _bodies(self, requests: Sequence[RowRequest], sampling: SamplingParams) -> list[dict[str, Any]]:
        """All that decides about tokens is said, so that nothing is left to what the server would choose."""
        common: dict[str, Any] = {
            "model": self._client.model, "n": 1, "stream": False, "echo": False, "logprobs": 0,
            "return_token_ids": True, "return_tokens_as_token_ids": True,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_k": max(sampling.top_k, 0), "top_p": sampling.top_p, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "ignore_eos": True, "stop_token_ids": self.all_stop_ids(sampling),
            "stop": list(sampling.stop), "include_stop_str_in_output": True,
        }  # fmt: skip
        return [
            common | {"prompt": request.prompt, "max_tokens": request.limit, "seed": request.seed}
            for request in requests
        ]

    def _answers(self, requests: Sequence[RowRequest], bodies: Sequence[dict[str, Any]]) -> list[RowResponse]:
        """In the order of the requests. The first error ends all others."""
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(bodies)):
            todo.put(number)
        count = min(len(bodies), self.config.max_num_seqs, MOST_CONNECTIONS)
        answers: list[RowResponse | None] = [None] * len(bodies)
        stopped, lines = threading.Event(), list[RetryingConnection]()

        def work() -> None:
            with self.http.connection(stopped) as connection:
                lines.append(connection)
                while not stopped.is_set():
                    try:
                        number = todo.get_nowait()
                    except queue.Empty:
                        return
                    answers[number] = _answer(
                        connection.request("POST", COMPLETIONS, bodies[number]), requests[number], self.http.url
                    )

        with ThreadPoolExecutor(count) as pool:
            try:
                for done in as_completed([pool.submit(work) for _ in range(count)]):
                    done.result()
            except BaseException:
                stopped.set()
                for line in list(lines):
                    line.abort()
                raise
        return [answer for answer in answers if answer is not None]


def _answer(told: Any, request: RowRequest, url: str) -> RowResponse:
    """One answer, which has to be one to this request."""
    try:
        (choice,) = told["choices"]
        tokens, log_probs, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        same = choice["prompt_token_ids"] == request.prompt
        cached = ((told.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(
            f"{url} does not answer as vLLM's server does, with token ids and log-probs: {error!r}"
        ) from error
    if not same or len(tokens) != len(log_probs) or not 0 < len(tokens) <= request.limit:
        raise RolloutError(
            f"{url} answered a prompt of {len(request.prompt)} tokens and a limit of {request.limit} with "
            f"{len(tokens)} tokens and {len(log_probs)} log-probs{'' if same else ', to another prompt'}"
        )
    if reason not in ("stop", "length"):
        raise RolloutError(f"{url} broke a response off ({reason}); somebody else told it to")
    return RowResponse(
        tokens, [float("nan") if value is None else value for value in log_probs], reason == "stop", cached
    )


def _wait_for(url: str, timeout: float) -> None:
    """Until a server that somebody else started is ready."""
    deadline = time.monotonic() + timeout
    http = HTTPClient(url, min(timeout, 10.0), 0.0)
    while True:
        try:
            http.request("GET", "/health")
            return
        except RolloutError as error:
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"no server is ready at vllm_server_base_url={url} after {timeout:g} s (vllm_server_timeout): "
                    f"{error}"
                ) from error
        time.sleep(min(1.0, timeout / 10))
