"""Control one vLLM server: check its settings, sync weights, verify checksums, sleep and wake up.

client = ServerClient(http, config, transport)
client.handshake()                                  # raises an error with the command that starts a compatible server
client.send_weights(expected, weights, version)     # in buckets, to all workers of the server
client.check_version(version)                       # raises an error if the server restarted or holds other weights
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
"""Methods of the workers that are idempotent and may be retried."""

Transport = Literal["shared_memory", "broadcast"]


class ServerClient:
    """Client for all requests to one server except completions."""

    def __init__(self, http: HTTPClient, config: RolloutEngineConfig, transport: Transport | None):
        self._http, self._config = http, config
        self._transport: Transport = transport or ("shared_memory" if _is_loopback(http.url) else "broadcast")
        self._identity: list[str] = []
        self.model = ""
        """Name under which the server serves the model."""

    def handshake(self) -> None:
        """Read the identities of the server's workers and raise an error if its settings do not match the config."""
        models = self._http.request("GET", "/v1/models")
        try:
            self.model = models["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise RolloutError(
                f"{self._http.url} serves no model: /v1/models returned {models}; check vllm_server_base_url"
            ) from error
        workers = self._call_workers("hello")
        self._identity = [worker["identity"] for worker in workers]
        mismatches = [mismatch for worker in workers[:1] for mismatch in self._find_mismatches(worker)]
        if mismatches:
            raise RolloutError(
                f"the server at {self._http.url} has incompatible settings: {'; '.join(mismatches)}. Start it with:\n"
                f"{server_command(self._config)}"
            )

    def _find_mismatches(self, worker: Mapping[str, Any]) -> list[str]:
        """Describe each setting of a worker that does not have the required value."""
        required_options = {
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "dtype": self._config.dtype,
        }
        mismatches = [
            f"--{name.replace('_', '-')} is {worker[name]}, not {value}"
            for name, value in required_options.items()
            if worker[name] != value
        ]
        if worker["max_model_len"] < self._config.max_model_len:
            mismatches.append(f"--max-model-len is {worker['max_model_len']}, less than {self._config.max_model_len}")
        return mismatches

    def check_version(self, version: str) -> None:
        """Raise an error unless all workers hold the weights of the weight sync `version`."""
        for identity, worker in zip(self._identity, self._call_workers("state"), strict=True):
            if worker["identity"] != identity:
                raise RolloutError(
                    f"the server at {self._http.url} was restarted after the weight sync and does not hold the trained "
                    "weights; resume the run from its last checkpoint"
                )
            self._check_worker_version(worker["version"], version)

    def _check_worker_version(self, version: str | None, expected: str) -> None:
        if version != expected:
            raise RolloutError(
                f"the server at {self._http.url} holds the weights of {version or 'no weight sync'}, not those of "
                f"{expected}, because another process also sends it weights; use one server per rank"
            )

    # -- weights ----------------------------------------------------------------------------------

    def send_weights(self, expected: ExpectedWeights, weights: Iterable[tuple[str, Tensor]], version: str) -> None:
        """Send all weights. The server is paused for all clients during the transfer."""
        self.handshake()
        self._http.post_once("/pause?mode=wait")
        try:
            self._send(expected, weights, version)
        finally:
            self._http.post_once("/resume")

    def _send(self, expected: ExpectedWeights, weights: Iterable[tuple[str, Tensor]], version: str) -> None:
        sender = self._open_sender()
        shapes = {
            name: (str(weight.meta.dtype).removeprefix("torch."), tuple(weight.meta.shape))
            for name, weight in expected.weights.items()
        }
        try:
            # The workers must run each call while this process executes its side of the transfer.
            with ThreadPoolExecutor(1) as executor:
                names = expected.canonical_names
                begin = {"handle": sender.handle(), "canonical_names": names, "shapes": shapes}
                self._call_workers_during(executor, sender.connect, "begin", **begin)
                for pieces, num_bytes in pack_buckets(expected.validate(weights), sender.buffer):
                    bucket = {"pieces": [vars(piece) for piece in pieces], "num_bytes": num_bytes}
                    self._call_workers_during(executor, lambda: sender.push(num_bytes), "bucket", **bucket)  # noqa: B023
            self._call_workers("end", version=version)
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            sender.close()

    def _abort(self, error: BaseException) -> None:
        """Cancel the weight sync on the server. If that fails too, attach the second error to `error` as a note."""
        try:
            self._call_workers("abort")
        except RolloutError as abort_error:
            error.add_note(f"Cancelling the weight sync also failed: {abort_error}")

    def _open_sender(self) -> Sender:
        size = self._config.update_weights_bucket_megabytes * 2**20
        if self._transport == "shared_memory":
            return SharedMemory(size)
        return Broadcast(torch.device("cpu"), size, _local_address_towards(self._http.url), len(self._identity))

    def _call_workers_during(
        self, executor: ThreadPoolExecutor, transfer: Callable[[], None], method: str, **payload: Any
    ) -> None:
        """Call the workers in another thread while `transfer` runs in this one. Worker errors take precedence."""
        call = executor.submit(self._call_workers, method, **payload)
        try:
            transfer()
        except RolloutError:
            call.result()
            raise
        call.result()

    def digests(self, version: str) -> Mapping[str, int]:
        """Return the checksums of the server's weights. Raise an error if its workers hold different weights."""
        workers = self._call_workers("digests")
        digests: dict[str, int] = workers[0]["digests"]
        for worker in workers:
            self._check_worker_version(worker["version"], version)
            names = [name for name, number in digests.items() if worker["digests"].get(name) != number]
            if names:
                raise RolloutError(
                    f"the workers of {self._http.url} hold different weights for {', '.join(names[:8])}; restart the "
                    "server"
                )
        return digests

    # -- memory -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free the KV cache and, on a GPU, the weights."""
        if torch.device(self._config.device).type == "cpu":
            self._http.post_once("/reset_prefix_cache")
            self._call_workers("free_kv_cache")
        else:
            self._http.post_once("/sleep?level=2")

    def wake_up(self) -> None:
        """Allocate the KV cache and, on a GPU, memory for the weights."""
        if torch.device(self._config.device).type == "cpu":
            self._call_workers("restore_kv_cache")
        else:
            self._http.post_once("/wake_up")

    # -- requests to the workers ------------------------------------------------------------------

    def _call_workers(self, method: str, **payload: Any) -> list[Any]:
        """Call a method of `WorkerWeights` in every worker and return one result per worker."""
        body = {"method": "camshaft", "args": [method, json.dumps(payload)]}
        try:
            if method in IDEMPOTENT:
                results = self._http.request("POST", "/collective_rpc", body)["results"]
            else:
                results = self._http.post_once("/collective_rpc", body)["results"]
        except RolloutError as error:
            if "HTTP 404" in str(error):
                raise RolloutError(
                    f"{self._http.url} does not accept weights; start the server with {DEV_MODE}=1. {error}"
                ) from error
            if "has no attribute 'camshaft'" in str(error):
                raise RolloutError(
                    f"{self._http.url} does not accept weights from camshaft; start the server with "
                    f"--worker-extension-cls {EXTENSION} in an environment where camshaft is installed:\n"
                    f"{server_command(self._config)}"
                ) from error
            raise
        for result in results:
            if "error" in result:
                raise RolloutError(f"{self._http.url}: {result['error']}")
            if "traceback" in result:
                raise RolloutError(f"{method} failed in {self._http.url}:\n{result['traceback']}")
        return [result["result"] for result in results]


def _is_loopback(url: str) -> bool:
    """Return True if the host of `url` is on this machine's loopback interface."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _local_address_towards(url: str) -> str:
    """Return the address of this machine at which the server can reach it."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=10.0) as probe:
        return probe.getsockname()[0]
