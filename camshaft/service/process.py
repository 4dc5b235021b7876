"""The worker processes of the role, which are started again if one of them dies.

    with RoleProcess(config) as role:
        seats = role.call_ranks("create", "s:train:0", "models/tiny", None, 0)
        role.call("publish", "s:train:0", "v1")

Calls come from one thread. A `Refusal` of the role is raised as `CommandError`. After a crash, `generation` is another
number: the models of earlier generations are lost, and the versions that are not in files.
"""

from types import TracebackType
from typing import Any, Self

import torch

from camshaft.config.serve import ServeConfig
from camshaft.controller import Options, Pool, PoolSpec, spawn, start_pools
from camshaft.controller.local import process_pool
from camshaft.errors import ConfigError, WorkerError
from camshaft.roles.served import Refusal, ServedWorker
from camshaft.service.errors import CommandError


class PerRank(list[Any]):
    """An argument of which each rank gets its entry."""


class RoleProcess:
    """A `ServedWorker` on each rank of a pool of processes."""

    def __init__(self, config: ServeConfig, worker: type[ServedWorker] = ServedWorker):
        self.config, self.worker = config, worker
        self.generation = 0
        self._pool: Pool | None = None
        self._role: Any = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the role on all ranks. Start the processes first if one has died in an earlier call."""
        if self._pool is None:
            self._start()
        try:
            result = getattr(self._role, method)(*arguments)
        except WorkerError:
            self._stop()
            self.generation += 1
            raise
        refusals = [found for found in (result if isinstance(result, list) else [result]) if isinstance(found, Refusal)]
        if refusals:
            raise CommandError(refusals[0].message)
        return result

    def call_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method that returns a result of each rank. Of a `PerRank` argument, each rank gets its entry."""
        size = self.config.world_size
        return self.call(method, *(a if isinstance(a, PerRank) else [a] * size for a in arguments))

    def _start(self) -> None:
        config = self.config
        spec = PoolSpec("worker", config.nnodes, config.ranks, device=config.device, roles=("served",))
        options = Options(preload=(self.worker.__module__,), import_main=False)
        if config.backend() == "local":
            _check_devices(config)
            self._pool = process_pool(spec, options)
        else:
            (self._pool,) = start_pools([spec], config.backend(), options)
        self._role = spawn(self.worker, self.config, pool=self._pool, name="served")

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = self._role = None


def _check_devices(config: ServeConfig) -> None:
    """Raise ConfigError if the ranks need more accelerators than this machine has."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = config.device or ("cpu" if accelerator is None else accelerator.type)
    count = 0 if accelerator is None or accelerator.type != kind else torch.accelerator.device_count()
    if kind != "cpu" and count < config.ranks:
        raise ConfigError(
            f"ranks={config.ranks} and device={kind}: each rank needs a {kind} device, and this machine has {count}. "
            "Set a smaller number of ranks, or device=cpu"
        )
