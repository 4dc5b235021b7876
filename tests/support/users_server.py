"""A server of a user with the built-in generator, which kills itself in a named state and is started again.

with users_server(folder / "server", folder / "actor", Death("generating", version=2), seconds=3.0) as server:
    server.url
server.num_starts()
server.synced()             # (version, checksums of the weights) of each weight sync, in order

The process that starts the servers plays the user. Without `seconds`, no server is started again.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from camshaft.config import RolloutEngineConfig
from camshaft.digest import digest
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout
from support.fake_servers import fake_server
from support.forked_python import fork_python
from support.gated_rollouts import WorkerReplies

STATES = ("receiving", "generating", "idle")
STARTS, SYNCED = "starts", "synced.jsonl"
ANSWERED = 2
"""Number of rows that a server answers before it dies while it generates."""
IDLE_SECONDS = 0.05
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Death:
    """State in which a server is killed: it receives the weights of a version, generates with them, or is idle."""

    state: str
    version: int


@dataclass(frozen=True)
class UsersServer:
    url: str
    folder: Path

    def num_starts(self) -> int:
        return len((self.folder / STARTS).read_text().splitlines())

    def synced(self) -> list[tuple[int, dict[str, int]]]:
        lines = (self.folder / SYNCED).read_text().splitlines()
        return [(version, digests) for version, digests in map(json.loads, lines)]


class TorchReplies(WorkerReplies):
    """Replies of vLLM's server, with the tokens of the built-in generator."""

    def __init__(self, model: str, folder: Path):
        self._folder, self._lock, self._version = folder, threading.Lock(), -1
        self._num_requests = self._num_answered = 0
        self._rollout = TorchRollout(RolloutEngineConfig(model_path=model, max_model_len=MAX_MODEL_LEN))
        super().__init__(
            {"identity": secrets.token_hex(4), "version": None, "logprobs_mode": "processed_logprobs",
             "generation_config": "vllm", "max_model_len": MAX_MODEL_LEN, "dtype": "float32", "device": ""}
        )  # fmt: skip

    def __call__(self, path: str, body: Any) -> tuple[int, Any]:
        with self._lock:
            self._num_requests += 1
            return (200, self._complete(body)) if path == "/v1/completions" else super().__call__(path, body)

    def bucket(self, **arguments: Any) -> None:
        super().bucket(**arguments)
        self._die("receiving", self._version + 1)

    def end(self, version: str) -> None:
        super().end(version)
        self._version, self._num_answered = int(version.split()[2]), 0  # "weight sync 3 of ..."
        self._rollout.load_weights(self.weights.items(), self._version)
        with (self._folder / SYNCED).open("a") as file:
            digests = {name: digest(weight) for name, weight in self.weights.items()}
            file.write(f"{json.dumps([self._version, digests])}\n")

    def state(self) -> dict[str, Any]:
        if self._num_answered:  # the check after the last response
            threading.Timer(IDLE_SECONDS, self._die_if_idle, (self._num_requests,)).start()
        return self.hello()

    def _die_if_idle(self, num_requests: int) -> None:
        with self._lock:
            if num_requests == self._num_requests:
                self._die("idle", self._version)

    def _complete(self, body: Any) -> dict[str, Any]:
        if self._num_answered == ANSWERED:
            self._die("generating", self._version)
        self._num_answered += 1
        sampling = SamplingParams(
            body["max_tokens"], body["temperature"], body["top_k"], body["top_p"],
            ignore_eos=True, stop_token_ids=tuple(body["stop_token_ids"]),
        )  # fmt: skip
        prompt, seed = Ragged.from_rows([body["prompt"]], torch.int64), torch.tensor([body["seed"]])
        out = self._rollout.generate_sequences(prompt, sampling, seed)
        choice = {
            "prompt_token_ids": body["prompt"],
            "token_ids": out.responses.values.tolist(),
            "logprobs": {"token_logprobs": out.log_probs.values.tolist()},
            "finish_reason": "stop" if out.finished[0] else "length",
        }
        return {"choices": [choice]}

    def _die(self, state: str, version: int) -> None:
        file = self._folder / "death"
        if file.exists() and file.read_text() == f"{state} {version}":
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def serve(model: str, folder: Path, port: int) -> None:
    with fake_server(TorchReplies(model, folder), port), (folder / STARTS).open("a") as file:
        file.write("started\n")
        file.flush()
        signal.pause()


def serve_again(model: str, folder: str, port: str, seconds: str) -> None:
    """Start a server, and start it again `seconds` after each death."""
    while True:
        server = os.fork()
        if not server:
            serve(model, Path(folder), int(port))
        os.waitpid(server, 0)
        if not seconds:
            return
        time.sleep(float(seconds))


@contextmanager
def users_server(folder: Path, model: Path, death: Death | None, seconds: float | None = None) -> Iterator[UsersServer]:
    """Run a server, and wait until it is ready."""
    folder.mkdir()
    if death is not None:
        (folder / "death").write_text(f"{death.state} {death.version}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"import sys; from {__name__} import serve_again; serve_again(*sys.argv[1:])"
    pause = "" if seconds is None else str(seconds)
    user = fork_python(["-c", code, str(model), str(folder), str(port), pause], stdin=subprocess.DEVNULL)
    try:
        while not (folder / STARTS).exists():
            assert user.poll() is None
            time.sleep(0.05)
        yield UsersServer(f"http://127.0.0.1:{port}", folder)
    finally:
        os.killpg(user.pid, signal.SIGKILL)
        user.wait()
