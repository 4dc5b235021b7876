"""Start vLLM's server for one rank on 127.0.0.1. The server is ended when the trainer's process ends.

process = ServerProcess(config, options.arguments)
process.wait(240.0)                     # until the server is ready; errors show the last lines of its log
process.url
process.end()
"""

import contextlib
import importlib.util
import json
import os
import secrets
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import with_device_index
from camshaft.errors import GeneratorError, NoAnswerError, RolloutError
from camshaft.rollout.external import reject_reserved
from camshaft.rollout.server.http_client import HTTPClient
from camshaft.rollout.vllm.engine import engine_arguments
from camshaft.rollout.vllm.guard import API_KEY
from camshaft.rollout.vllm.installed import MISSING
from camshaft.subprocesses import (
    POLL_SECONDS,
    GroupGuard,
    Limit,
    Wait,
    describe_exit,
    describe_process,
    kill_group,
    start_python,
)

HOST = "127.0.0.1"
EXTENSION = "camshaft.rollout.vllm.worker.WorkerExtension"
"""Import path of the class that vLLM adds to its workers."""
GUARD = "camshaft.rollout.vllm.guard.KeyGuard"
"""Import path of the middleware that requires the key. vLLM applies the last middleware first."""
DEV_MODE = "VLLM_SERVER_DEV_MODE"
"""Environment variable that enables weight updates in vLLM's server."""
LAST_LINES = 30
END_SECONDS = 5.0
"""Time limit for a server to end by itself."""
TRAINER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING")
"""Environment variables that would make the server join the trainer's ranks."""


def command_line_options(config: RolloutEngineConfig, arguments: Mapping[str, Any]) -> list[str]:
    """Return the command-line options with which a server is compatible with `config`."""
    required_options = engine_arguments(config)
    reject_reserved(arguments, [*required_options, "api_key"])
    command: list[str] = []
    options = {**required_options, **arguments, "worker_extension_cls": EXTENSION, "enable_prompt_tokens_details": True}
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{'' if value else 'no-'}{option}")
        elif isinstance(value, dict):
            command += [f"--{option}", json.dumps(value)] if value else []
        elif isinstance(value, list | tuple):
            command += [f"--{option}", *map(str, value)] if value else []
        elif value is not None:
            command += [f"--{option}", str(value)]
    return command


def server_command(config: RolloutEngineConfig) -> str:
    """Return the shell command that starts a server that is compatible with `config`."""
    program = f"{DEV_MODE}=1 python -m vllm.entrypoints.openai.api_server"
    return f"{program} {shlex.join(command_line_options(config, {}))}"


class ServerProcess:
    """A server process. It is ended by `end`, or when this process ends, even if a signal kills this process.

    Every route of the server requires `key`: the value of VLLM_API_KEY or, if that is unset, a random one. The server
    reads it from its environment, because all users of the machine can read its command line.
    """

    def __init__(self, config: RolloutEngineConfig, arguments: Mapping[str, Any]):
        if importlib.util.find_spec("vllm") is None:
            raise RolloutError(
                f"rollout.name=server requires vLLM to start a server, but it is not installed: {MISSING}"
            )
        port = _free_port()
        self.url = f"http://{HOST}:{port}"
        self.key = os.environ.get(API_KEY) or secrets.token_urlsafe(32)
        self._name = f"camshaft-{secrets.token_hex(4)}"
        self._exit_report = ""
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open while the server runs
        server = [
            "-m", "vllm.entrypoints.openai.api_server", "--host", HOST, "--port", str(port),
            "--served-model-name", self._name, "--disable-uvicorn-access-log",
            *command_line_options(config, arguments), "--middleware", GUARD,
        ]  # fmt: skip
        environment = _environment(config.device) | {API_KEY: self.key}
        self._server = start_python(
            server, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self._guard = GroupGuard(self._server.pid, grace_seconds=END_SECONDS)
        except BaseException:
            kill_group(self._server.pid)
            self._server.wait()
            raise

    def wait(self, timeout: float) -> None:
        """Wait until the server is ready. After `timeout` seconds, stop it and raise an error."""
        http = HTTPClient(self.url, Limit(POLL_SECONDS * 10, ""), 0.0, key=self.key)
        start = Wait("start", NoAnswerError, Limit(timeout, f"engine_kwargs.vllm_server_timeout={timeout:g}"))
        try:
            while True:
                if report := self.exit_report():
                    raise GeneratorError(f"the server started at {self.url} {report}")
                with contextlib.suppress(RolloutError):
                    http.request("GET", "/health")
                    # If another server occupies the port, the name differs and this server exits.
                    if http.request("GET", "/v1/models")["data"][0]["id"] == self._name:
                        return
                start.check(self.describe, lambda short: "" if short else self._last_lines())
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.end()
            raise

    def describe(self) -> str:
        return f"the server started at {self.url} ({describe_process(self._server.pid)})"

    def exit_report(self) -> str:
        """Return a description of the server's exit with the last lines of its log, or "" while the server runs."""
        with self._lock:
            if not self._exit_report and (code := self._server.poll()) is not None:
                self.end()
                self._exit_report = f"has ended ({describe_exit(code)}). {self._last_lines()}"
            return self._exit_report

    def end(self) -> None:
        """Stop the server, and kill its process group. Do nothing in a forked child or if it has already ended.

        A server that is killed at once leaves its shared memory behind.
        """
        if self._exit_report or os.getpid() != self._owner:
            return
        self._exit_report = "was stopped"
        try:
            self._server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(END_SECONDS)
        finally:
            kill_group(self._server.pid)
            self._guard.cancel()
            self._server.wait()

    def _last_lines(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        written = os.pread(self._log.fileno(), 2**14, max(0, size - 2**14)).decode(errors="replace").strip()
        lines = "\n".join(written.splitlines()[-LAST_LINES:])
        return f"The last lines of its log:\n{lines}" if lines else "Its log is empty"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _environment(device: str) -> dict[str, str]:
    """Return the environment variables of the server, without those that describe the trainer's ranks."""
    environment = {name: value for name, value in os.environ.items() if name not in TRAINER_VARIABLES}
    environment[DEV_MODE] = "1"
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    device_type = torch.device(device).type
    if device_type == "cpu":
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # binding would take cores away from the trainer
    elif device_type == "cuda":
        index = with_device_index(device).index or 0
        visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environment["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)
    return environment
