"""Control one vLLM server: check its settings, sync weights, verify checksums, sleep and wake up.

client = ServerClient(http, config, weight_transfer)
client.handshake()                                  # raises an error with the command that starts a compatible server
client.send_weights(expected, weights, version)     # in buckets, to all workers of the server
client.check_version(version)                       # raises an error if the server restarted or holds other weights
"""

import contextlib
import functools
import json
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.config.schema.rollouts import WeightTransfer
from camshaft.device import device_identity, with_device_index
from camshaft.errors import GeneratorError, RolloutError
from camshaft.rollout.server.http_client import HTTPClient, ServerUnavailable
from camshaft.rollout.server.launch import DEV_MODE, EXTENSION, server_command
from camshaft.rollout.weights import transport
from camshaft.rollout.weights.buckets import pack_buckets
from camshaft.rollout.weights.checks import ExpectedWeights
from camshaft.rollout.weights.transport import Broadcast, DeviceMemory, Sender, SharedMemory

logger = logging.getLogger(__name__)

IDEMPOTENT = ("hello", "state", "digests")
"""Methods of the workers that are idempotent and may be retried."""


class ServerClient:
    """Client for all requests to one server except completions."""

    def __init__(self, http: HTTPClient, config: RolloutEngineConfig, transfer: WeightTransfer | None):
        self._http, self._config = http, config
        self._transfer: WeightTransfer | None = transfer
        self._device = with_device_index(config.device)
        self._identity: list[str] = []
        self._devices: list[str] = []
        """Identity of the accelerator of each worker, "" on a CPU."""
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
        self._devices = [worker.get("device", "") for worker in workers]
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
        for worker in self._synced(self._call_workers("state")):
            self._check_worker_version(worker["version"], version)

    def _synced(self, workers: list[Any]) -> list[Any]:
        """Return the answers of the workers. Raise an error unless they are those of the weight sync."""
        if [worker["identity"] for worker in workers] != self._identity:
            raise GeneratorError(
                f"the server at {self._http.url} was restarted after the weight sync and does not hold the trained "
                "weights"
            )
        return workers

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
        with _undo_after_error(lambda: self._http.post_once("/resume"), "Resuming the server"):
            self._send(expected, weights, version)
        self._http.post_once("/resume")

    def _send(self, expected: ExpectedWeights, weights: Iterable[tuple[str, Tensor]], version: str) -> None:
        """Send all buckets. The workers load a bucket while the next one is gathered."""
        abort = _undo_after_error(lambda: self._call_workers("abort"), "Cancelling the weight sync")
        # The workers must run each call while this process executes its side of the transfer.
        with abort, contextlib.ExitStack() as senders, ThreadPoolExecutor(1) as executor:
            sender = self._begin(executor, expected, senders)
            loading: Future[Any] | None = None
            for bucket in pack_buckets(expected.validate(weights), sender.buffers):
                if loading is not None:
                    loading.result()
                pieces, number, num_bytes = [vars(p) for p in bucket.pieces], bucket.buffer, bucket.num_bytes
                transfer = functools.partial(sender.push, number, num_bytes)
                arguments = {"pieces": pieces, "buffer": number, "num_bytes": num_bytes}
                loading = self._call_workers_during(executor, transfer, "bucket", **arguments)
            if loading is not None:
                loading.result()
            self._call_workers("end", version=version)

    def _begin(self, executor: ThreadPoolExecutor, expected: ExpectedWeights, senders: contextlib.ExitStack) -> Sender:
        """Open a sender, which `senders` closes, and connect the workers to it.

        If the workers cannot open device memory that the config does not demand, host memory is used instead.
        """
        transfer = self._transfer or self._select_transfer()
        sender = self._open_sender(transfer)
        senders.callback(sender.close)
        shapes = {
            name: (str(weight.meta.dtype).removeprefix("torch."), tuple(weight.meta.shape))
            for name, weight in expected.weights.items()
        }
        begin = {"handle": sender.handle(), "canonical_names": expected.canonical_names, "shapes": shapes}
        try:
            self._call_workers_during(executor, sender.connect, "begin", **begin).result()
        except RolloutError as error:
            if self._transfer is not None or transfer != "device_memory":
                raise
            logger.warning("%s. Weights are sent through host memory, which takes longer", error)
            self._transfer = "shared_memory"
            return self._begin(executor, expected, senders)
        return sender

    def _select_transfer(self) -> WeightTransfer:
        """Return the fastest transport that works with the devices of the trainer and of the workers."""
        if not _is_loopback(self._http.url):
            return "broadcast"
        problem = self._device_memory_problem()
        if not problem:
            return "device_memory"
        if self._device.type != "cpu":
            logger.warning("weights are sent through host memory, because %s", problem)
        self._transfer = "shared_memory"
        return "shared_memory"

    def _device_memory_problem(self) -> str:
        """Return the reason why the workers cannot open the trainer's device memory, or "" if they can."""
        if self._device.type not in transport.IPC_DEVICES:
            return f"the trainer runs on device={self._device}, which does not share its memory"
        identity = device_identity(self._device)
        others = sorted({device or "a CPU" for device in self._devices if device != identity})
        return f"the server runs on {', '.join(others)} and the trainer on {identity}" if others else ""

    def _device_broadcast_problem(self) -> str:
        """Return the reason why the trainer and the workers cannot form a group of their devices, or ""."""
        identity = device_identity(self._device)
        if identity and identity in self._devices:
            return f"the server runs on {identity} like the trainer, and NCCL requires one device per process"
        if any(bool(device) != bool(identity) for device in self._devices):
            return f"the trainer runs on {identity or 'a CPU'} and the server on {', '.join(self._devices) or 'a CPU'}"
        return ""

    def _open_sender(self, transfer: WeightTransfer) -> Sender:
        problems = {"device_memory": self._device_memory_problem, "device_broadcast": self._device_broadcast_problem}
        problem = problems[transfer]() if transfer in problems else ""
        if problem:
            raise RolloutError(
                f"weight_transfer={transfer} is not possible, because {problem}; omit engine_kwargs.weight_transfer"
            )
        size = self._config.update_weights_bucket_megabytes * 2**20
        if transfer == "shared_memory":
            return SharedMemory(size)
        if transfer == "device_memory":
            return DeviceMemory(self._device, size)
        device = self._device if transfer == "device_broadcast" else torch.device("cpu")
        return Broadcast(device, size, _local_address_towards(self._http.url), len(self._identity))

    def _call_workers_during(
        self, executor: ThreadPoolExecutor, transfer: Callable[[], None], method: str, **payload: Any
    ) -> Future[list[Any]]:
        """Call the workers in another thread while `transfer` runs in this one. Worker errors take precedence.

        Return when `transfer` is done; the workers may still process the call.
        """
        call = executor.submit(self._call_workers, method, **payload)
        try:
            transfer()
        except RolloutError:
            call.result()
            raise
        return call

    def digests(self, version: str) -> Mapping[str, int]:
        """Return the checksums of the server's weights. Raise an error if its workers hold different weights."""
        workers = self._synced(self._call_workers("digests"))
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
        if self._device.type == "cpu":
            self._http.post_once("/reset_prefix_cache")
            self._call_workers("free_kv_cache")
        else:
            self._http.post_once("/sleep?level=2")

    def wake_up(self) -> None:
        """Allocate the KV cache and, on a GPU, memory for the weights."""
        if self._device.type == "cpu":
            self._call_workers("restore_kv_cache")
        else:
            self._http.post_once("/wake_up")

    # -- requests to the workers ------------------------------------------------------------------

    def _call_workers(self, method: str, **payload: Any) -> list[Any]:
        """Call a method of `WorkerWeights` in every worker and return one result per worker."""
        body = {"method": "camshaft", "args": [method, json.dumps(payload)]}
        post = functools.partial(self._http.request, "POST") if method in IDEMPOTENT else self._http.post_once
        try:
            results = post("/collective_rpc", body)["results"]
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


@contextlib.contextmanager
def _undo_after_error(undo: Callable[[], object], name: str) -> Iterator[None]:
    """Call `undo` after an error in the block. If that fails too, attach the second error to the first as a note."""
    try:
        yield
    except BaseException as error:
        try:
            undo()
        except RolloutError as undo_error:
            error.add_note(f"{name} also failed: {undo_error}")
        raise


def _is_loopback(url: str) -> bool:
    """Return True if the host of `url` is on this machine's loopback interface."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _local_address_towards(url: str) -> str:
    """Return the address of this machine at which the server can reach it."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=10.0) as probe:
            return probe.getsockname()[0]
    except OSError as error:
        raise ServerUnavailable(f"no connection to {url} ({error}); check that the server is still running") from error
