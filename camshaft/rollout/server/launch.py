"""Starting vLLM's server for one rank: on 127.0.0.1, on a port that is free, with the process of the trainer.

launched = ServerProcess(config, options.arguments)
launched.wait(240.0)                    # or an error with the last lines that it wrote
launched.url
launched.end()
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import camshaft
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import here
from camshaft.errors import RolloutError
from camshaft.rollout.external import reject_reserved
from camshaft.rollout.server import guard
from camshaft.rollout.server.http_client import HTTPClient
from camshaft.rollout.vllm.engine import engine_arguments
from camshaft.rollout.vllm.installed import MISSING

HOST = "127.0.0.1"
POLL_SECONDS = 0.2
EXTENSION = "camshaft.rollout.vllm.worker.WorkerExtension"
"""What vLLM adds to its workers."""
DEV_MODE = "VLLM_SERVER_DEV_MODE"
"""Only with it does vLLM's server take weights."""
LAST_LINES = 30
OF_THE_TRAINER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING")
"""Variables of the environment that would make vLLM one of the trainer's ranks."""


def command_line_options(config: RolloutEngineConfig, arguments: Mapping[str, Any]) -> list[str]:
    """The options of a server that this rollout can use, as typed behind its name."""
    known = engine_arguments(config)
    reject_reserved(arguments, known)
    words: list[str] = []
    options = {**known, **arguments, "worker_extension_cls": EXTENSION, "enable_prompt_tokens_details": True}
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        elif isinstance(value, dict):
            words += [f"--{option}", json.dumps(value)] if value else []
        elif value is not None:
            words += [f"--{option}", str(value)]
    return words


def server_command(config: RolloutEngineConfig) -> str:
    """What somebody types who starts the server."""
    place = f"{DEV_MODE}=1 python -m vllm.entrypoints.openai.api_server"
    return f"{place} {shlex.join(command_line_options(config, {}))}"


class ServerProcess:
    """A server of our own. It ends with this object's `end`, and with this process, however that ends."""

    def __init__(self, config: RolloutEngineConfig, arguments: Mapping[str, Any]):
        if importlib.util.find_spec("vllm") is None:
            raise RolloutError(f"rollout.name=server needs vLLM to start its server: {MISSING}")
        port = _free_port()
        self.url = f"http://{HOST}:{port}"
        self._name = f"camshaft-{secrets.token_hex(4)}"
        self._ended = ""
        self._asking = threading.Lock()
        self._owner = os.getpid()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as the server runs
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(port)]
        server += [
            "--served-model-name",
            self._name,
            "--disable-uvicorn-access-log",
            *command_line_options(config, arguments),
        ]
        self._guard = subprocess.Popen(
            [sys.executable, "-P", str(Path(guard.__file__)), str(os.getpid()), *server],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=_environment(config.device),
            start_new_session=True,
        )

    def wait(self, timeout: float) -> None:
        """Until it answers; if it does not, it is ended."""
        http, deadline = HTTPClient(self.url, POLL_SECONDS * 10, 0.0), time.monotonic() + timeout
        try:
            while True:
                if ended := self.ended():
                    raise RolloutError(f"the server that was started at {self.url} {ended}")
                with contextlib.suppress(RolloutError):
                    http.request("GET", "/health")
                    # Somebody else may have taken the port, and then ours will end.
                    if http.request("GET", "/v1/models")["data"][0]["id"] == self._name:
                        return
                if time.monotonic() > deadline:
                    raise RolloutError(
                        f"the server that was started at {self.url} is not ready after {timeout:g} s; give "
                        f"engine_kwargs.vllm_server_timeout more seconds if it is only slow. {self._last_lines()}"
                    )
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.end()
            raise

    def ended(self) -> str:
        """How it ended, with its last lines; empty while it runs."""
        with self._asking:
            if not self._ended and self._guard.poll() is not None:
                self.end()
                self._ended = f"has ended. {self._last_lines()}"
            return self._ended

    def end(self) -> None:
        """Kill it; a second time does nothing. A forked copy of this process owns nothing."""
        if self._ended or os.getpid() != self._owner:
            return
        self._ended = "was let go"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait()

    def _last_lines(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        written = os.pread(self._log.fileno(), 2**14, max(0, size - 2**14)).decode(errors="replace").strip()
        lines = "\n".join(written.splitlines()[-LAST_LINES:])
        return f"Its last lines:\n{lines}" if lines else "It wrote nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _environment(device: str) -> dict[str, str]:
    """Of the server: it finds this package, and thinks nothing of the trainer's ranks."""
    there = {name: value for name, value in os.environ.items() if name not in OF_THE_TRAINER}
    home = str(Path(camshaft.__file__).resolve().parent.parent)
    there["PYTHONPATH"] = os.pathsep.join(filter(None, [there.get("PYTHONPATH"), home]))
    there[DEV_MODE] = "1"
    there.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    there.setdefault("VLLM_NO_USAGE_STATS", "1")
    place = torch.device(device)
    if place.type == "cpu":
        there.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else it takes cores from the trainer
    elif place.type == "cuda":
        own = here(device).index or 0
        visible = [name for name in there.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        there["CUDA_VISIBLE_DEVICES"] = visible[own] if visible else str(own)
    return there
