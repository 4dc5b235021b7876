"""Driver programs for a role on two machines, called by `Machine.call` of `namespaces.py`.

error, seconds = head.call(failing, "stall", folder)

The functions return plain values, which the caller can compare.
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from camshaft.contracts.controller.roles import Toy
from camshaft.controller import Dispatch, Options, PoolSpec, RankInfo, pool, register, spawn
from camshaft.errors import WorkerError

TWO = PoolSpec(nnodes=2, device="cpu")


class LocatedRole(Toy):
    """A role that returns its host name, rank and environment."""

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def where(self) -> Any:
        return socket.gethostname(), self.rank_info, os.environ.get("GLOO_SOCKET_IFNAME")

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def nccl_debug(self) -> Any:
        return os.environ.get("NCCL_DEBUG")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave_a_sign(self, file: Path) -> None:
        file.touch()


def chosen() -> list[str | None]:
    """Return the variable of each rank that both the driver and the runtime environment set."""
    os.environ["NCCL_DEBUG"] = "of the driver"
    init = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "of the runtime environment"}}}
    with pool(TWO, "ray", Options(ray_init=init)) as two:
        values = spawn(LocatedRole, pool=two, timeout=60).nccl_debug()
    ray.shutdown()
    return values


def places() -> list[tuple[str, RankInfo, str | None]]:
    """Return the machines of the ranks after an all-reduce."""
    with pool(TWO, "ray") as two:
        role = spawn(LocatedRole, pool=two, timeout=60)
        assert role.sum_over_ranks(1.0) == 3.0
        locations = role.where()
    ray.shutdown()
    return locations


def failing(method: str, sign: Path, timeout: float = 60.0) -> tuple[str, float]:
    """Return the error of a call that fails on rank 1, and its duration. The call creates `sign` when it starts."""
    with pool(TWO, "ray", Options(timeout=60)) as two:
        role = spawn(LocatedRole, pool=two, timeout=timeout, name="critic")
        role.leave_a_sign(sign)
        start_time = time.monotonic()
        with pytest.raises(WorkerError) as exc_info:
            role.stall(1) if method == "stall" else role.kill(1)
        seconds = time.monotonic() - start_time
    ray.shutdown()
    return str(exc_info.value), seconds
