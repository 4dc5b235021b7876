"""Control one vLLM server: check its settings, sync weights, verify checksums, sleep and wake up.

client = ServerClient(http, config, transport)
client.handshake()                                  # raises an error with the command of a compatible server
client.send_weights(expected, weights, version)     # in buckets, to all workers of the server
client.check_version(version)                       # raises an error if the server restarted or has other weights
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.errors import RolloutError
from camshaft.rollout.server.http_client import HTTPClient
from camshaft.rollout.server.launch import DEV_MODE, EXTENSION, server_command
from camshaft.rollout.weights.buckets import pack_buckets
from camshaft.rollout.weights.checks import ExpectedWeights
from camshaft.rollout.weights.transport import Broadcast, Sender, SharedMemory

IDEMPOTENT = ("hello", "state", "digests")
"""Idempotent methods of the workers, which may be retried."""

Transport = Literal["shared_memory", "broadcast"]


class ServerClient:
    """Requests to one server beside completions."""

    def __init__(self, http: HTTPClient, config: RolloutEngineConfig, transport: Transport | None):
        self._http, self._config = http, config
        self._transport: Transport = transport or ("shared_memory" if _is_loopback(http.url) else "broadcast")
        self._identity: list[str] = []
        self.model = ""
        """Name of the model on the server."""

    def handshake(self) -> None:
        """Read the identity of the workers, and check that the server's settings fit the config."""
        models = self._http.request("GET", "/v1/models")
        try:
            self.model = models["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise RolloutError(
                f"{self._http.url} serves no model: /v1/models returned {models}; check vllm_server_base_url"
            ) from error
        workers = self._call_workers("hello")
        self._identity = [worker["identity"] for worker in workers]
        wrong = [problem for worker in workers[:1] for problem in self._misfits(worker)]
        if wrong:
            raise RolloutError(
                f"the server at {self._http.url} has incompatible settings: {'; '.join(wrong)}. Start it with:\n"
                f"{server_command(self._config)}"
            )

    def _misfits(self, worker: Mapping[str, Any]) -> list[str]:
        """Describe the settings of a worker that differ from the required ones."""
        required = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "dtype": self._config.dtype}
        wrong = [
            f"--{name.replace('_', '-')} is {worker[name]}, not {value}"
            for name, value in required.items()
            if worker[name] != value
        ]
        if worker["max_model_len"] < self._config.max_model_len:
            wrong.append(f"--max-model-len is {worker['max_model_len']}, less than {self._config.max_model_len}")
        return wrong

    def check_version(self, version: str) -> None:
        """Raise an error unless all workers hold the weights of this weight sync."""
        for identity, worker in zip(self._identity, self._call_workers("state"), strict=True):
            if worker["identity"] != identity:
                raise RolloutError(
                    f"the server at {self._http.url} was restarted after the weight sync and does not hold the trained "
                    "weights; resume the run from its last checkpoint"
                )
            self._check_same(worker["version"], version)

    def _check_same(self, version: str | None, expected: str) -> None:
        if version != expected:
            raise RolloutError(
                f"the server at {self._http.url} holds weights of {version or 'no weight sync'}, not those of "
                f"{expected}; another process sends it weights too. Use one server per rank"
            )

    # -- weights ----------------------------------------------------------------------------------

    def send_weights(self, expected: ExpectedWeights, weights: Iterable[tuple[str, Tensor]], version: str) -> None:
        """Send all weights; the server is paused for all clients meanwhile."""
        self.handshake()
        self._http.post_once("/pause?mode=wait")
        try:
            self._send(expected, weights, version)
        finally:
            self._http.post_once("/resume")

    def _send(self, expected: ExpectedWeights, weights: Iterable[tuple[str, Tensor]], version: str) -> None:
        sender = self._sender()
        shapes = {
            name: (str(weight.meta.dtype).removeprefix("torch."), tuple(weight.meta.shape))
            for name, weight in expected.weights.items()
        }
        try:
            # The workers must receive each message while this process does its part of the transfer.
            with ThreadPoolExecutor(1) as executor:
                names = expected.canonical_names
                begin = {"handle": sender.handle(), "canonical_names": names, "shapes": shapes}
                self._call_workers_during(executor, sender.connect, "begin", **begin)
                for pieces, used in pack_buckets(expected.validate(weights), sender.buffer):
                    bucket = {"pieces": [vars(piece) for piece in pieces], "used": used}
                    self._call_workers_during(executor, lambda: sender.push(used), "bucket", **bucket)  # noqa: B023
            self._call_workers("end", version=version)
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            sender.close()

    def _abort(self, error: BaseException) -> None:
        """Cancel the weight sync on the server; a second error becomes a note on the first."""
        try:
            self._call_workers("abort")
        except RolloutError as second:
            error.add_note(f"Cancelling the weight sync failed as well: {second}")

    def _sender(self) -> Sender:
        size = self._config.update_weights_bucket_megabytes * 2**20
        if self._transport == "shared_memory":
            return SharedMemory(size)
        return Broadcast(torch.device("cpu"), size, _local_address_towards(self._http.url), len(self._identity))

    def _call_workers_during(
        self, executor: ThreadPoolExecutor, transfer: Callable[[], None], method: str, **payload: Any
    ) -> None:
        """Call the workers while `transfer` runs in this thread; an error of the workers takes precedence."""
        call = executor.submit(self._call_workers, method, **payload)
        try:
            transfer()
        except RolloutError:
            call.result()
            raise
        call.result()

    def digests(self, version: str) -> Mapping[str, int]:
        """Return the checksums of the server's weights; raise an error if its workers differ."""
        first, *others = self._call_workers("digests")
        for worker in (first, *others):
            self._check_same(worker["version"], version)
            wrong = [name for name, number in first["digests"].items() if worker["digests"].get(name) != number]
            if wrong:
                raise RolloutError(f"the workers of {self._http.url} hold different weights: {', '.join(wrong[:8])}")
        return first["digests"]

    # -- memory -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free the KV cache and, on a GPU, the weights."""
        if torch.device(self._config.device).type == "cpu":
            self._http.post_once("/reset_prefix_cache")
            self._call_workers("free_kv_cache")
        else:
            self._http.post_once("/sleep?level=2")

    def wake_up(self) -> None:
        """Allocate the KV cache and, on a GPU, the memory of the weights."""
        if torch.device(self._config.device).type == "cpu":
            self._call_workers("restore_kv_cache")
        else:
            self._http.post_once("/wake_up")

    # -- requests to the workers ------------------------------------------------------------------

    def _call_workers(self, method: str, **payload: Any) -> list[Any]:
        """Call a method of `WorkerWeights` in every worker, and return one result per worker."""
        body = {"method": "camshaft", "args": [method, json.dumps(payload)]}
        try:
            if method in IDEMPOTENT:
                results = self._http.request("POST", "/collective_rpc", body)["results"]
            else:
                results = self._http.post_once("/collective_rpc", body)["results"]
        except RolloutError as error:
            if "HTTP 404" in str(error):
                raise RolloutError(
                    f"{self._http.url} does not accept weights; start it with {DEV_MODE}=1. {error}"
                ) from error
            if "has no attribute 'camshaft'" in str(error):
                raise RolloutError(
                    f"{self._http.url} does not accept weights from camshaft; start it with --worker-extension-cls "
                    f"{EXTENSION} in an environment with camshaft:\n{server_command(self._config)}"
                ) from error
            raise
        for result in results:
            if "error" in result:
                raise RolloutError(f"{self._http.url}: {result['error']}")
            if "traceback" in result:
                raise RolloutError(f"{method} failed in {self._http.url}:\n{result['traceback']}")
        return [result["result"] for result in results]


def _is_loopback(url: str) -> bool:
    """Return True for an address on this machine's loopback interface."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _local_address_towards(url: str) -> str:
    """Return the address of this machine that the server can reach."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=10.0) as probe:
        return probe.getsockname()[0]
