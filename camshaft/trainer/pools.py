"""The pools of a run: which processes are started, by whom, and which roles live in them.

with run_pools(config.trainer, pool_specs(config), config.ray_kwargs.ray_init, logs) as pools:
    critic = spawn(CriticWorker, ..., pool=pools["critic_pool"])
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from camshaft.config import GLOBAL_POOL, PlaceConfig, PPOConfig, pool_sizes
from camshaft.controller import Options, Pool, PoolSpec, pools

logger = logging.getLogger(__name__)

ROLE_MODULES = ("camshaft.roles",)
"""What worker processes import while they start."""


def pool_specs(config: PPOConfig) -> list[PoolSpec]:
    """Each pool of an RL run that some role lives in, the actor's first."""
    trainer, homes = config.trainer, config.pools()
    sizes = pool_sizes(trainer, trainer.resource_pools)
    return [
        PoolSpec(
            name,
            sizes[name].nnodes,
            sizes[name].n_gpus_per_node,
            trainer.device,
            trainer.cpus_per_rank,
            roles=tuple(role for role, home in homes.items() if home == name),
        )
        for name in dict.fromkeys(homes.values())
    ]


def global_pool(trainer: PlaceConfig, role: str) -> PoolSpec:
    """The one pool of a run with one role."""
    return PoolSpec(
        GLOBAL_POOL, trainer.nnodes, trainer.n_gpus_per_node, trainer.device, trainer.cpus_per_rank, roles=(role,)
    )


@contextlib.contextmanager
def run_pools(
    trainer: PlaceConfig, specs: Sequence[PoolSpec], ray_init: Mapping[str, Any], log_folder: Path | None
) -> Iterator[dict[str, Pool]]:
    """The running pools by name; the workers write to files of `log_folder`."""
    logs = None if log_folder is None else str(log_folder.expanduser().absolute())
    options = Options(log_folder=logs, preload=ROLE_MODULES, ray_init=ray_init)
    backend = trainer.backend()
    for spec in specs:
        if backend != "local" or spec.world_size > 1:
            size = f"{spec.nnodes} x {spec.ranks_per_node} processes"
            where = f"; what they write is in {logs}/{spec.name}_rank*.log" if logs else ""
            logger.info("%s (%s): %s on %s%s", spec.name, ", ".join(spec.roles), size, backend, where)
    with pools(specs, backend, options) as started:
        yield {pool.spec.name: pool for pool in started}
