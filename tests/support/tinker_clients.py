"""A server of the Tinker API in this process, for the client of the contract (`camshaft.contracts.tinker.client`).

with running_server(folder, max_models=4) as server:
    model = server.client().create_model(rank=8)
    output = model.wait(model.train(1, [datum([5, 6, 7], weights=[0.0, 1.0])]))
    model.wait(model.step(2, learning_rate=0.1))
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from camshaft import storage
from camshaft.config.serve import ServeConfig, read_serve_config
from camshaft.contracts.tinker.client import (
    Client,
    ClientModel,
    Failed,
    Refused,
    datum,
    put,
    read_output,
    read_samples,
    training_request,
)
from camshaft.controller import Options, PoolSpec, spawn
from camshaft.controller.local import start
from camshaft.http import LocalServer, ServerLimits
from camshaft.roles.sampled import SamplingWorker
from camshaft.roles.served import ServedWorker
from camshaft.service.app import App
from camshaft.service.keys import Keys
from camshaft.service.process import RoleProcess
from camshaft.service.service import Service
from support.tiny import tiny_folder

__all__ = [
    "BASE",
    "Client",
    "ClientModel",
    "Failed",
    "InProcessRole",
    "Refused",
    "RunningServer",
    "datum",
    "put",
    "read_output",
    "read_samples",
    "running_server",
    "training_request",
]

BASE = "tiny"
"""Name of the base model."""


@dataclass
class RunningServer:
    """A server in this process."""

    config: ServeConfig
    service: Service
    role: RoleProcess
    sampler: RoleProcess | None
    """Processes that only sample, with `sampling_ranks`."""
    port: int
    key: str
    clients: list[Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Client:
        client = Client(self.url, self.key, BASE).open()
        self.clients.append(client)
        return client

    def finish(self) -> None:
        """End the sessions of all clients."""
        while self.clients:
            self.clients.pop().finish()


class InProcessRole(RoleProcess):
    """A role in this process, which starts at once."""

    def _start(self) -> None:
        spec = PoolSpec("worker", device=self.config.device, roles=("served",))
        self._pool = start([spec], Options())[0]
        self._role = spawn(self.worker, self.config, pool=self._pool)


@contextlib.contextmanager
def running_server(
    folder: Path,
    keys: Path | None = None,
    app: type[App] = App,
    worker: type[ServedWorker] | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """Run a server on a free port, with a tiny model under the name `tiny`.

    With a class of workers, the worker is in this process instead of one of its own.
    """
    served = folder / "served"
    values = {
        "model": f"{BASE}={tiny_folder(tie_embeddings=False)}",
        "folder": served,
        "port": 0,
        "device": "cpu",
        **options,
    }
    config = read_serve_config([f"{name}={value}" for name, value in values.items()])
    storage.make_folder(served)
    own = Keys.load(served, keys)
    assert own.own_key is not None
    with contextlib.ExitStack() as stack:
        role = stack.enter_context(RoleProcess(config) if worker is None else InProcessRole(config, worker))
        sampler = stack.enter_context(RoleProcess(config, SamplingWorker)) if config.sampling_ranks else None
        service = Service(config, role, sampler)
        limits = ServerLimits(64, config.max_megabytes * 2**20)
        with LocalServer(app(service, own), limits, config.port) as server:
            service.start()
            server.start()
            try:
                yield RunningServer(config, service, role, sampler, server.server_port, own.own_key)
            finally:
                service.close()
