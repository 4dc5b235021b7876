"""The worker process of the role, which is started again if it dies.

    with RoleProcess(config) as role:
        role.call("create", "s:train:0", "models/tiny", None, 0)

Calls come from one thread. A `Refusal` of the role is raised as `CommandError`. After a crash, `generation` is another
number: the models of earlier generations are lost, and the versions that are not in files.
"""

from types import TracebackType
from typing import Any, Self

from camshaft.config.serve import ServeConfig
from camshaft.controller import Options, Pool, PoolSpec, spawn
from camshaft.controller.local import process_pool
from camshaft.errors import WorkerError
from camshaft.roles.served import Refusal, ServedWorker
from camshaft.service.errors import CommandError


class RoleProcess:
    """A `ServedWorker` in a process of its own."""

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
        """Call a method of the role. Start the process first if it has died in an earlier call."""
        if self._pool is None:
            self._start()
        try:
            result = getattr(self._role, method)(*arguments)
        except WorkerError:
            self._stop()
            self.generation += 1
            raise
        if isinstance(result, Refusal):
            raise CommandError(result.message)
        return result

    def _start(self) -> None:
        spec = PoolSpec("worker", device=self.config.device, roles=("served",))
        self._pool = process_pool(spec, Options(preload=(self.worker.__module__,), import_main=False))
        self._role = spawn(self.worker, self.config, pool=self._pool, name="served")

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = self._role = None
