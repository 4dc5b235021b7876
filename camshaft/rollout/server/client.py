"""What is asked of a server beside tokens: whether it fits, which weights it has, and here are others.

client = ServerClient(http, config, means)
client.handshake()                                      # an error says what is missing, and how to start it
client.send_weights(expected, weights, version)            # in buckets, to all of its workers
client.check_version(version)                              # an error if it has others, or was started anew
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

READS = ("hello", "state", "digests")
"""What changes nothing in the server, and may be asked for again."""

Means = Literal["shared_memory", "broadcast"]


class ServerClient:
    """See the map above."""

    def __init__(self, http: HTTPClient, config: RolloutEngineConfig, means: Means | None):
        self._http, self._config = http, config
        self._means: Means = means or ("shared_memory" if _is_here(http.url) else "broadcast")
        self._identity: list[str] = []
        self.model = ""
        """What the server calls its model."""

    def handshake(self) -> None:
        """Find out whom we talk to, and whether it can do what is asked of it."""
        models = self._http.request("GET", "/v1/models")
        try:
            self.model = models["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise RolloutError(
                f"{self._http.url} serves no model that it would name: /v1/models says {models}"
            ) from error
        workers = self._ask("hello")
        self._identity = [worker["identity"] for worker in workers]
        wrong = [problem for worker in workers[:1] for problem in self._misfits(worker)]
        if wrong:
            raise RolloutError(
                f"the server at {self._http.url} does not fit: {'; '.join(wrong)}. Start it so:\n"
                f"{server_command(self._config)}"
            )

    def _misfits(self, told: Mapping[str, Any]) -> list[str]:
        wanted = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "dtype": self._config.dtype}
        wrong = [
            f"--{name.replace('_', '-')} is {told[name]}, not {value}"
            for name, value in wanted.items()
            if told[name] != value
        ]
        if told["max_model_len"] < self._config.max_model_len:
            wrong.append(f"--max-model-len is {told['max_model_len']}, less than {self._config.max_model_len}")
        return wrong

    def check_version(self, version: str) -> None:
        """That it still has the weights of this hand-over."""
        for identity, worker in zip(self._identity, self._ask("state"), strict=True):
            if worker["identity"] != identity:
                raise RolloutError(
                    f"the server at {self._http.url} was started anew since it was given weights; what it has is not "
                    "the model that is trained. Resume the run from its last checkpoint"
                )
            self._same(worker["version"], version)

    def _same(self, found: str | None, wanted: str) -> None:
        if found != wanted:
            raise RolloutError(
                f"the server at {self._http.url} holds weights of {found or 'nobody'}, not those of {wanted}; somebody "
                "else gives it weights too. Each rank needs a server of its own"
            )

    # -- weights ----------------------------------------------------------------------------------

    def send_weights(self, expected: ExpectedWeights, weights: Iterable[tuple[str, Tensor]], version: str) -> None:
        """All of them; while they are on the way, the server generates for nobody."""
        self.handshake()
        self._http.post_once("/pause?mode=wait")
        try:
            self._send(expected, weights, version)
        finally:
            self._http.post_once("/resume")

    def _send(self, expected: ExpectedWeights, weights: Iterable[tuple[str, Tensor]], version: str) -> None:
        sender = self._sender()
        own = expected.canonical_names
        shapes = {
            name: (str(weight.meta.dtype).removeprefix("torch."), tuple(weight.meta.shape))
            for name, weight in expected.weights.items()
        }
        try:
            with ThreadPoolExecutor(1) as messenger:  # the workers have to hear of it while we meet them
                self._meanwhile(messenger, sender.meet, "begin", handle=sender.handle(), own=own, shapes=shapes)
                for pieces, used in pack_buckets(expected.validate(weights), sender.buffer):
                    told = [vars(piece) for piece in pieces]
                    self._meanwhile(messenger, lambda: sender.push(used), "bucket", pieces=told, used=used)  # noqa: B023
            self._ask("end", version=version)
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            sender.close()

    def _abort(self, error: BaseException) -> None:
        """So that it does not stay in the middle of a hand-over; the first error is the one to tell."""
        try:
            self._ask("abort")
        except RolloutError as second:
            error.add_note(f"Nor could the hand-over be called off: {second}")

    def _sender(self) -> Sender:
        size = self._config.update_weights_bucket_megabytes * 2**20
        if self._means == "shared_memory":
            return SharedMemory(size)
        return Broadcast(torch.device("cpu"), size, _our_name_for(self._http.url), len(self._identity))

    def _meanwhile(self, messenger: ThreadPoolExecutor, ours: Callable[[], None], what: str, **payload: Any) -> None:
        """Tell the workers, and do our part of it at the same time; what they say against it comes first."""
        asked = messenger.submit(self._ask, what, **payload)
        try:
            ours()
        except RolloutError:
            asked.result()
            raise
        asked.result()

    def digests(self, version: str) -> Mapping[str, int]:
        """Of the weights that it holds; all of its workers have to agree."""
        first, *others = self._ask("digests")
        for worker in (first, *others):
            self._same(worker["version"], version)
            wrong = [name for name, number in first["digests"].items() if worker["digests"].get(name) != number]
            if wrong:
                raise RolloutError(f"the workers of {self._http.url} hold different weights: {', '.join(wrong[:8])}")
        return first["digests"]

    # -- memory -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free keys and values, and the weights where vLLM can (on a GPU)."""
        if torch.device(self._config.device).type == "cpu":
            self._http.post_once("/reset_prefix_cache")
            self._ask("free_kv_cache")
        else:
            self._http.post_once("/sleep?level=2")

    def wake_up(self) -> None:
        """Memory for weights, and for keys and values."""
        if torch.device(self._config.device).type == "cpu":
            self._ask("restore_kv_cache")
        else:
            self._http.post_once("/wake_up")

    # -- words ------------------------------------------------------------------------------------

    def _ask(self, what: str, **payload: Any) -> list[Any]:
        """One answer of each worker."""
        body = {"method": "camshaft", "args": [what, json.dumps(payload)]}
        try:
            if what in READS:
                answers = self._http.request("POST", "/collective_rpc", body)["results"]
            else:
                answers = self._http.post_once("/collective_rpc", body)["results"]
        except RolloutError as error:
            if "HTTP 404" in str(error):
                raise RolloutError(f"{self._http.url} takes no weights; start it with {DEV_MODE}=1. {error}") from error
            if "has no attribute 'camshaft'" in str(error):
                raise RolloutError(
                    f"{self._http.url} takes no weights from here; start it with --worker-extension-cls {EXTENSION}, "
                    f"where this package is installed:\n{server_command(self._config)}"
                ) from error
            raise
        for answer in answers:
            if "refused" in answer:
                raise RolloutError(f"{self._http.url}: {answer['refused']}")
            if "failed" in answer:
                raise RolloutError(f"{what} failed in {self._http.url}:\n{answer['failed']}")
        return [answer["done"] for answer in answers]


def _is_here(url: str) -> bool:
    """Whether this is an address of this machine's own loop."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _our_name_for(url: str) -> str:
    """The address of this machine under which the server can reach it."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=10.0) as probe:
        return probe.getsockname()[0]
