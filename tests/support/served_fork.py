"""A server in a fork of this process, which starts in milliseconds, can be killed, and continues on the same port.

with ServedFork(folder, save_every=3) as server:
    model = server.client().create_model()
    server.kill()
    server.start()

The role runs in the process of the server.
"""

import contextlib
import os
import signal
import socket
import sqlite3
import time
import traceback
from pathlib import Path
from typing import Any, Self

import torch

from camshaft.config.serve import read_serve_config
from camshaft.http import LocalServer, ServerLimits
from camshaft.service.app import App
from camshaft.service.keys import Keys, digest
from camshaft.service.service import Service
from camshaft.service.store import LOG
from support.tinker_clients import BASE, Client, InProcessRole
from support.tiny import tiny_folder

KEY = "tml-fork"


class ServedFork:
    """A server with a tiny model under the name `tiny`."""

    def __init__(self, folder: Path, **options: Any):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.folder, self.options, self.pid = folder / "served", options, 0
        self.folder.mkdir(exist_ok=True)
        tiny_folder(tie_embeddings=False)  # made before the fork

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.pid:
            self.kill()

    def start(self, **options: Any) -> None:
        """Start the server, with changed options, and wait until it accepts requests."""
        self.options |= options
        self.pid = os.fork()
        if not self.pid:
            try:
                self._serve()
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.01)
        self.pid = 0
        raise AssertionError("the server does not start")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def stop(self) -> None:
        """Stop the server as Ctrl-C does."""
        os.kill(self.pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0
        self.pid = 0

    def client(self, session: str = "") -> Client:
        client = Client(f"http://127.0.0.1:{self.port}", KEY, BASE, session=session)
        return client if session else client.open()

    def query(self, text: str, *values: Any) -> list[Any]:
        """Execute a statement in the log of the server."""
        with contextlib.closing(sqlite3.connect(self.folder / LOG, isolation_level=None)) as connection:
            return connection.execute(text, values).fetchall()

    def _serve(self) -> None:
        """Run in the child until SIGTERM."""
        torch.set_num_threads(1)  # a forked process has no OpenMP threads
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        values = {
            "model": f"{BASE}={tiny_folder(tie_embeddings=False)}",
            "folder": self.folder,
            "device": "cpu",
            "port": self.port,
            **self.options,
        }
        config = read_serve_config([f"{name}={value}" for name, value in values.items()])
        with InProcessRole(config) as role:
            service = Service(config, role)
            app = App(service, Keys({digest(KEY): "local"}))
            with LocalServer(app, ServerLimits(64, 2**26), config.port) as server:
                service.start()
                server.start()
                signal.sigwait([signal.SIGTERM])
            service.close()
        os._exit(0)
