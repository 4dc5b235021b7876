"""The controller: one driver program calls roles that run on one or many ranks.

    from camshaft.controller import Dispatch, Worker, register, spawn, shutdown

    class Scaler(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def scale(self, batch: DataProto) -> DataProto: ...

    scaler = spawn(Scaler, world_size=2)      # a WorkerGroup; for a type checker, a Scaler
    out = scaler.scale(batch)                 # split by seat, run on both ranks, merged in order
    later = submit(scaler.scale, batch)       # returns at once: later.result(), or later.parts()
    shutdown(scaler)

    group.py           pools, worker groups, `spawn` and `submit`
    worker.py          the base class of roles, the placement of a rank, and the dispatch of calls to ranks
    resources.py       the resources of a pool, compared with those of the machines
    process_pool.py    base class of pools of processes: requests, answers, time limits, errors
    executor.py        executes requests in a worker process, and joins its process group
    local.py           the backend for one machine
    ray.py             the backend for a Ray cluster
    network.py         detects dead machines of a cluster; network interfaces
    stacks.py          stack dumps of other processes

Nothing in this package depends on reinforcement learning.
"""

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
from camshaft.controller.worker import Dispatch, RankInfo, Worker, register

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
