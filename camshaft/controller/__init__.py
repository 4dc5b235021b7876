"""The controller: one driver program calls roles that live on one or many ranks.

    from camshaft.controller import Dispatch, Worker, register, spawn, shutdown

    class Scaler(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def scale(self, batch: DataProto) -> DataProto: ...

    scaler = spawn(Scaler, world_size=2)      # for a type checker this is a Scaler
    out = scaler.scale(batch)                 # split by seat, run on both ranks, merged in order
    later = submit(scaler.scale, batch)       # the same, without waiting: later.result(), or later.parts()
    shutdown(scaler)

`dispatch.py` splits and merges (pure functions of the ranks' seats), `worker.py` is the base class of roles, `group.py`
the proxy. `pool.py` says what a pool of processes is, `resources.py` what it asks of the machines, `processes.py` how
requests and answers go and what is done when something goes wrong, `host.py` how a worker process answers. There are
two backends: `local.py` for one machine (`serve.py` and `wire.py` are its worker process and its socket) and `ray.py`
for a cluster. Nothing here knows of reinforcement learning.
"""

from camshaft.controller.dispatch import Dispatch, register
from camshaft.controller.group import (
    Options,
    Pending,
    Pool,
    WorkerGroup,
    pool,
    pools,
    shutdown,
    spawn,
    start_pools,
    submit,
    workers,
)
from camshaft.controller.resources import PoolSpec
from camshaft.controller.worker import RankInfo, Worker

__all__ = [
    "Dispatch",
    "Options",
    "Pending",
    "Pool",
    "PoolSpec",
    "RankInfo",
    "Worker",
    "WorkerGroup",
    "pool",
    "pools",
    "register",
    "shutdown",
    "spawn",
    "start_pools",
    "submit",
    "workers",
]
