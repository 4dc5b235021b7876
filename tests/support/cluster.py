"""Ray clusters on this machine, for a `with` block.

with ray_here(num_cpus=4): ...
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import ray
from ray.cluster_utils import Cluster


@contextlib.contextmanager
def ray_here(num_cpus: int, **options: Any) -> Iterator[None]:
    """Start a cluster that is declared with `num_cpus` CPUs."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # otherwise Ray starts one idle worker per CPU
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(address="local", num_cpus=num_cpus, object_store_memory=2**28, **(quiet | options))
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def two_machines(num_cpus: int = 2) -> Iterator[Any]:
    """Start a cluster of two nodes on this machine; `worker` is the node without the head."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": num_cpus, "object_store_memory": 2**28}
    cluster: Any = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.worker = cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
