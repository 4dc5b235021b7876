"""The server rollout, which generates through OpenAI-compatible completions and syncs weights to a worker extension.

    kwargs = {"vllm_server_base_url": "http://127.0.0.1:8000"}      # without it, the rollout starts a server
    rollout = ServerRollout(RolloutEngineConfig(model_path="models/tiny", engine_kwargs=kwargs))
    rollout.load_weights(engine.named_weights())
    rollout.generate_sequences(prompts, SamplingParams(max_tokens=64))

Each row is one request with its own seed. The rollout sends as many concurrent requests as the server decodes at a
time. Requests and responses contain token ids, not text. The rollout checks the server's weight version before the
first request and after the last response, and raises an error if the server restarted or received other weights in
between.
"""

import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from camshaft.config.backends import SERVER
from camshaft.config.rollout import OPTIONAL_SAMPLING, RolloutEngineConfig
from camshaft.config.schema.rollouts import ServerOptions
from camshaft.device import rank, world_size
from camshaft.errors import NoAnswerError, RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, SamplingParams
from camshaft.rollout.external import RowRequest, RowResponse
from camshaft.rollout.server.client import ServerClient
from camshaft.rollout.server.http_client import HTTPClient, RequestRejected, RetryingConnection
from camshaft.rollout.server.launch import ServerProcess
from camshaft.rollout.vllm.base import BaseVLLMRollout
from camshaft.subprocesses import NO_LIMIT, POLL_SECONDS, Limit, Wait

MAX_CONNECTIONS = 128
COMPLETIONS = "/v1/completions"


class ServerRollout(BaseVLLMRollout):
    """Generate with vLLM's server over HTTP."""

    capabilities = SERVER

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        try:
            options = ServerOptions.from_dict(config.engine_kwargs, world_size())
        except ValueError as error:
            raise RolloutError(f"engine_kwargs: {error}") from error
        self._process: ServerProcess | None = None
        self._name = secrets.token_hex(4)
        self._loaded_version: str | None = None
        self.http = self._connect(options)
        self._client = ServerClient(self.http, config, options.weight_transfer)
        self._client.handshake()

    def _connect(self, options: ServerOptions) -> HTTPClient:
        """Wait for the configured server or start a new one, and return a client for it."""
        timeout = options.timeout
        limit = None if timeout is None else Limit(timeout, f"engine_kwargs.timeout={timeout:g}")
        if options.vllm_server_base_url:
            url = options.vllm_server_base_url[rank()]
            _wait_until_healthy(url, options.vllm_server_timeout)
            return HTTPClient(url, limit, options.retry_timeout)
        if self.config.tensor_model_parallel_size > 1:
            raise RolloutError(
                f"tensor_model_parallel_size={self.config.tensor_model_parallel_size} is unsupported because each rank "
                "starts a server on its own device; set it to 1, or start a server with tensor parallelism yourself "
                "and set vllm_server_base_url"
            )
        process = self._process = ServerProcess(self.config, options.arguments)
        weakref.finalize(self, process.end)
        process.wait(options.vllm_server_timeout)
        return HTTPClient(process.url, limit, options.retry_timeout, process.exit_report, process.describe, process.key)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        self.check_ready_to_load()
        self._loaded_version = None
        label = f"weight sync {version} of {self._name}"
        self._client.send_weights(self.expected, weights, label)
        self._loaded_version, self.version = label, version

    def weight_digests(self) -> Mapping[str, int]:
        """Return the checksums that the server's workers computed."""
        return self._client.digests(self._version())

    def has_weights(self) -> bool:
        return self._loaded_version is not None

    def _version(self) -> str:
        self.check_ready()
        assert self._loaded_version is not None
        return self._loaded_version

    def sleep(self) -> None:
        """Free the memory of a server that this rollout started. Other servers may have other clients, so they stay."""
        if self._process is not None and not self._asleep and self.config.free_cache_engine:
            self._client.sleep()
        self._asleep, self._loaded_version = True, None

    def wake_up(self) -> None:
        if self._process is not None and self._asleep and self.config.free_cache_engine:
            self._client.wake_up()
        self._asleep = False

    def generate_sequences(
        self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None, generated: Ragged | None = None
    ) -> Generation:
        start, retries = time.perf_counter(), self.http.retries
        rows = self.start_rows(prompts, sampling, seeds, generated)
        requests = self.build_requests(rows)
        if not requests:
            return rows.complete(Generation.empty(prompts))
        bodies = self._build_bodies(requests, sampling)
        version = self._version()
        self._client.check_version(version)
        responses = self._fetch_responses(requests, bodies)
        self._client.check_version(version)
        out = self.build_generation(rows, responses, time.perf_counter() - start)
        out.metrics["http_retries"] = float(self.http.retries - retries)
        return rows.complete(out)

    def _build_bodies(self, requests: Sequence[RowRequest], sampling: SamplingParams) -> list[dict[str, Any]]:
        """Build the request bodies. They set every sampling parameter, so that no default of the server applies."""
        common_options: dict[str, Any] = {
            "model": self._client.model, "n": 1, "stream": False, "echo": False, "logprobs": 0,
            "return_token_ids": True, "return_tokens_as_token_ids": True,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_k": max(sampling.top_k, 0), "top_p": sampling.top_p,
            **{name: float(getattr(sampling, name)) for name in OPTIONAL_SAMPLING},
            "ignore_eos": True, "stop_token_ids": self.all_stop_ids(sampling),
            "stop": list(sampling.stop), "include_stop_str_in_output": True,
        }  # fmt: skip
        return [
            common_options | {"prompt": request.prompt, "max_tokens": request.limit, "seed": request.seed}
            for request in requests
        ]

    def _fetch_responses(self, requests: Sequence[RowRequest], bodies: Sequence[dict[str, Any]]) -> list[RowResponse]:
        """Send all requests concurrently and return the responses in request order.

        The first error cancels the remaining requests.
        """
        numbers = iter(range(len(bodies)))  # the threads share it; `next` is atomic
        count = min(len(bodies), self.config.max_num_seqs, MAX_CONNECTIONS)
        responses: dict[int, RowResponse] = {}
        stop_event, connections = threading.Event(), list[RetryingConnection]()

        def send_requests() -> None:
            with self.http.connection(stop_event) as connection:
                connections.append(connection)
                for number in numbers:
                    if stop_event.is_set():
                        return
                    reply = connection.request("POST", COMPLETIONS, bodies[number])
                    responses[number] = _to_response(reply, requests[number], self.http.url)

        progress = Wait(COMPLETIONS, NoAnswerError, self.http.limit)

        def describe() -> str:
            return f"{self.http.describe()} ({len(responses)} of {len(bodies)} responses)"

        with ThreadPoolExecutor(count) as pool:
            try:
                running = {pool.submit(send_requests) for _ in range(count)}
                num_received, since = 0, time.monotonic()
                while running:
                    done, running = wait(running, POLL_SECONDS, FIRST_COMPLETED)
                    for future in done:
                        future.result()
                    if len(responses) != num_received:
                        progress.finish(since)
                        num_received, since = len(responses), time.monotonic()
                    progress.check(describe, since=since)
            except BaseException:
                stop_event.set()
                for connection in list(connections):
                    connection.abort()
                raise
        return [responses[number] for number in range(len(bodies))]


def _to_response(reply: Any, request: RowRequest, url: str) -> RowResponse:
    """Parse the reply to one request and check that it matches the request."""
    try:
        (choice,) = reply["choices"]
        tokens, log_probs, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        same_prompt = choice["prompt_token_ids"] == request.prompt
        cached = ((reply.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(
            f"{url} returned a reply without token ids and log-probs, unlike vLLM's server ({error!r}); check "
            "vllm_server_base_url"
        ) from error
    if not same_prompt or len(tokens) != len(log_probs) or not 0 < len(tokens) <= request.limit:
        raise RolloutError(
            f"{url} answered a prompt of {len(request.prompt)} tokens and a limit of {request.limit} with "
            f"{len(tokens)} tokens and {len(log_probs)} log-probs{'' if same_prompt else ' for another prompt'}; "
            "check vllm_server_base_url"
        )
    if reason not in ("stop", "length"):
        raise RolloutError(
            f"{url} aborted a response (finish_reason={reason}), probably for another client; use one server per rank"
        )
    log_probs = [float("nan") if value is None else value for value in log_probs]
    return RowResponse(tokens, log_probs, reason == "stop", cached)


def _wait_until_healthy(url: str, timeout: float) -> None:
    """Wait until a server that was started elsewhere is ready."""
    deadline = time.monotonic() + timeout
    http = HTTPClient(url, Limit(min(timeout, 10.0), f"vllm_server_timeout={timeout:g}"), 0.0)
    start = Wait("GET /health", RolloutError, NO_LIMIT)
    while True:
        try:
            http.request("GET", "/health")
            return
        except RequestRejected:
            raise
        except RolloutError as error:
            if time.monotonic() > deadline:
                raise NoAnswerError(
                    f"no server is ready at vllm_server_base_url={url} after {timeout:g} s (vllm_server_timeout): "
                    f"{error}. Start the server and then the run again, or increase vllm_server_timeout"
                ) from error
        start.check(http.describe)
        time.sleep(min(1.0, timeout / 10))
