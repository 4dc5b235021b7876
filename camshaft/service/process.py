"""The worker processes of a role, which are started again if one of them dies.

    with RoleProcess(config) as role, RoleProcess(config, SamplingWorker) as sampler:
        seats = role.call_ranks("create", "s:train:0", "models/tiny", None, 0)
        role.call("publish", "s:train:0", "v1")

Calls come from one thread at a time. A `Refusal` of the role is raised as `CommandError`. After a crash,
`generation` is another number: the models of earlier generations are lost, and so are versions that are not in files.
"""

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch

from camshaft.config.serve import ServeConfig
from camshaft.controller import Options, Pool, PoolSpec, spawn, start_pools
from camshaft.controller.local import process_pool
from camshaft.errors import ConfigError, WorkerError
from camshaft.reshard import Snapshot
from camshaft.roles.sampled import Refusal, SamplingRole, SamplingWorker
from camshaft.roles.served import ServedWorker
from camshaft.service.errors import CommandError, WeightsLost

WORKER, SAMPLER = "worker", "sampler"
"""Names of the pools, which also begin the names of their processes."""


class PerRank(list[Any]):
    """An argument of which each rank gets its entry."""


class RoleProcess:
    """A worker on each rank of a pool of processes: one that trains, or one that only samples."""

    def __init__(self, config: ServeConfig, worker: type[SamplingRole] = ServedWorker):
        self.config, self.worker = config, worker
        name, ranks, self._other_ranks = WORKER, config.ranks, config.sampling_ranks
        if issubclass(worker, SamplingWorker):
            name, ranks, self._other_ranks = SAMPLER, config.sampling_ranks, config.ranks
        self.spec = PoolSpec(name, config.nnodes, ranks, device=config.device, roles=("served",))
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
        try:
            if self._pool is None:
                self._start()
            result = getattr(self._role, method)(*arguments)
        except WorkerError:
            self._stop()
            self.generation += 1
            raise
        refusals = [found for found in (result if isinstance(result, list) else [result]) if isinstance(found, Refusal)]
        if refusals:
            raise (WeightsLost if refusals[0].has_lost_weights else CommandError)(refusals[0].message)
        return result

    def call_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method that returns a result of each rank. Of a `PerRank` argument, each rank gets its entry."""
        size = self.spec.world_size
        return self.call(method, *(a if isinstance(a, PerRank) else [a] * size for a in arguments))

    def _start(self) -> None:
        ranks = self.spec.world_size + self.config.nnodes * self._other_ranks
        ray_init = {"num_cpus": max(ranks, len(os.sched_getaffinity(0)))}  # of a cluster that is started for both pools
        options = Options(
            timeout=self.config.worker_timeout,
            setting="worker_timeout",
            preload=(self.worker.__module__,),
            import_main=False,
            ray_init=ray_init,
        )
        if self.config.backend() == "local":
            _check_devices(self.config)
            first_device = self._other_ranks if self.spec.name == SAMPLER else 0
            self._pool = process_pool(self.spec, options, first_device, self._other_ranks)
        else:
            (self._pool,) = start_pools([self.spec], self.config.backend(), options)
        self._role = spawn(self.worker, self.config, pool=self._pool, name="served")

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = self._role = None


class Roles:
    """The processes that train and publish weights, and those that sample, which may be the same ones.

    The thread that trains never calls processes that only sample, because it would wait for their samples.
    """

    def __init__(self, trainer: RoleProcess, sampler: RoleProcess | None, bases: Iterable[str]):
        self.trainer, self.sampler = trainer, sampler or trainer
        self._dtypes: dict[str, Any] = {}
        """Dtypes in which the processes that only sample receive the weights of each base model."""
        self._informed: int | None = None
        """Generation of the processes that train which knows these dtypes."""
        self._machines: set[str] = set()
        """Machines of the processes that only sample."""
        self._located: int | None = None
        """Generation of the processes that only sample which runs on these machines."""
        if self.are_separate:
            self._dtypes = {base: self.sampler.call("weight_dtypes", base) for base in bases}
            self.locate_samplers()

    @property
    def are_separate(self) -> bool:
        return self.sampler is not self.trainer

    def set_dtypes(self) -> None:
        """Let the processes that train know the dtypes in which weights are published."""
        if self._informed != self.trainer.generation:
            for base, dtypes in self._dtypes.items():
                self.trainer.call("set_dtypes", base, dtypes)
            self._informed = self.trainer.generation

    def locate_samplers(self) -> None:
        """Find the machines of the processes that only sample. The thread that samples calls this after a crash."""
        if self._located != self.sampler.generation:
            self._machines = set(self.sampler.call("machine"))
            self._located = self.sampler.generation

    def share(self, version: str) -> list[Snapshot]:
        """Return the memory from which processes that only sample read published weights.

        If a machine of theirs has no process that trains, the weights are also written to a file.
        """
        if not self.are_separate:
            return []
        found: list[Snapshot] = self.trainer.call("snapshots", version)
        if not self._machines <= {snapshot.machine for snapshot in found}:
            self.trainer.call("keep_versions", [version])
        return found


def _check_devices(config: ServeConfig) -> None:
    """Raise ConfigError if the ranks need more accelerators than this machine has."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = config.device or ("cpu" if accelerator is None else accelerator.type)
    count = 0 if accelerator is None or accelerator.type != kind else torch.accelerator.device_count()
    if kind != "cpu" and count < config.ranks + config.sampling_ranks:
        own = f" and sampling_ranks={config.sampling_ranks}" if config.sampling_ranks else ""
        raise ConfigError(
            f"ranks={config.ranks}{own} with device={kind}: each rank needs a {kind} device, and this machine has "
            f"{count}. Set smaller numbers of ranks, or device=cpu"
        )
