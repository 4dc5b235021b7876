"""Select the Ray cluster of a run before Ray is imported.

    BACKENDS["ray"] = "camshaft.controller.ray_cluster:start"

A run joins the cluster at `ray_init.address` or, if that is unset, at RAY_ADDRESS. Otherwise it joins a cluster that
already runs on this machine, or starts one. All sockets of a cluster that the run starts are bound to the loopback
interface, because no other machine has to reach it, and its clients need Ray's token. Without a dashboard, which would
show them, Ray collects no metrics. Ray reads these settings when it is imported and when its daemons start.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from camshaft.controller.group import Options, Pool
from camshaft.controller.network import accepts_connections
from camshaft.controller.resources import PoolSpec

SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable of Ray. With 0, the address of a machine is 127.0.0.1 on every operating system."""

NO_METRICS = {"RAY_enable_metrics_collection": "0", "RAY_event_stats": "0"}
"""Environment variables of Ray. With its metrics, the memory of its daemons and their logs grow."""


def start(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    """Start all pools or none. Raise `ConfigError` if the cluster is too small."""
    starts_cluster = cluster_address(options.ray_init) in (None, "local")
    with _ray_environment(options.ray_init) if starts_cluster else contextlib.nullcontext():
        from camshaft.controller import ray

        return ray.start(specs, options)


def cluster_address(ray_init: Mapping[str, Any]) -> str | None:
    """Return the address of the cluster to join, or None or "local" to start one."""
    return ray_init.get("address") or os.environ.get("RAY_ADDRESS") or _local_cluster()


def _local_cluster() -> str | None:
    """Return the address of a cluster that runs on this machine, or None if there is none or it does not answer."""
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    file = Path(temporary) / "ray" / "ray_current_cluster"
    address = file.read_text(encoding="utf-8").strip() if file.exists() else None
    return address if address and head_may_answer(address) else None


def head_may_answer(address: str | None) -> bool:
    """Return False if the address contains a port that does not accept connections."""
    host, _, port = (address or "").rpartition(":")
    return not port.isdigit() or accepts_connections(host.strip("[]"), int(port))


@contextlib.contextmanager
def _ray_environment(ray_init: Mapping[str, Any]) -> Iterator[None]:
    """Configure Ray for one machine while it is imported and its processes start. Values set by the user win."""
    settings = {SEVERAL_MACHINES: "0"} | ({} if ray_init.get("include_dashboard") else NO_METRICS)
    unset = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(unset)
    constants: Any = sys.modules.get("ray._private.ray_constants")
    if constants is None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray sets the same default, and warns about it
    elif SEVERAL_MACHINES in unset:
        constants.ENABLE_RAY_CLUSTER = False  # because Ray read the variable when it was imported
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]
