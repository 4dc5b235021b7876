"""Configure Ray before it is imported.

    BACKENDS["ray"] = "camshaft.controller.ray_environment:start"

All sockets of a cluster that the run starts are bound to the loopback interface, because no other machine has to reach
it, and its clients need Ray's token. Without a dashboard, which would show them, Ray collects no metrics. Ray reads
these settings when it is imported and when its daemons start.
"""

import contextlib
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from camshaft.controller.group import Options, Pool
from camshaft.controller.ray_cluster import find_cluster
from camshaft.controller.resources import PoolSpec

SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable of Ray. With 0, the address of a machine is 127.0.0.1 on every operating system."""

NO_METRICS = {"RAY_enable_metrics_collection": "0", "RAY_event_stats": "0"}
"""Environment variables of Ray. With its metrics, the memory of its daemons and their logs grow."""


def start(specs: Sequence[PoolSpec], options: Options) -> list[Pool]:
    """Start all pools or none. Raise `ConfigError` if the cluster is too small."""
    starts_cluster = find_cluster(options.ray_init).starts
    with _ray_environment(options.ray_init) if starts_cluster else contextlib.nullcontext():
        from camshaft.controller import ray

        return ray.start(specs, options)


@contextlib.contextmanager
def _ray_environment(ray_init: Mapping[str, Any]) -> Generator[None]:
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
