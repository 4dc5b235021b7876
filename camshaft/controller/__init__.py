"""The controller, with which one driver program calls roles that run on one or many ranks.

    from camshaft.controller import Dispatch, Worker, register, spawn, shutdown

    class Scaler(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def scale(self, batch: DataProto) -> DataProto: ...

    scaler = spawn(Scaler, world_size=2)      # a WorkerGroup that type checkers treat as a Scaler
    out = scaler.scale(batch)                 # splits the batch, runs on both ranks, and concatenates the results
    pending = submit(scaler.scale, batch)     # returns immediately; pending.result() waits
    shutdown(scaler)

    group.py           pools, worker groups, `spawn` and `submit`
    worker.py          the base class of roles, the placement of a rank, and the dispatch of calls to ranks
    placement.py       the pools and devices of a config
    resources.py       compares the resources that pools request with those of the machines
    process_pool.py    the base class of pools of processes: requests, answers, time limits and errors
    executor.py        executes requests in a worker process and joins the process group of its pool
    local.py           the backend for one machine
    ray_environment.py configures Ray before it is imported
    ray_cluster.py     finds the Ray cluster that a run joins
    ray.py             the backend for a Ray cluster
    network.py         detects dead machines of a cluster and finds network interfaces

Only `placement.py` reads the config of a run. The other modules do not depend on reinforcement learning.
"""

from camshaft.controller.group import (
    Options,
    Pending,
    Pool,
    WorkerGroup,
    pool,
    pools,
    pools_of,
    prepare_call,
    shutdown,
    spawn,
    start_pools,
    submit,
    workers,
)
from camshaft.controller.resources import PoolSpec
from camshaft.controller.worker import Dispatch, RankInfo, Worker, register

__all__ = [
    "Dispatch", "Options", "Pending", "Pool", "PoolSpec", "RankInfo", "Worker", "WorkerGroup", "pool", "pools",
    "pools_of", "prepare_call", "register", "shutdown", "spawn", "start_pools", "submit", "workers",
]  # fmt: skip
