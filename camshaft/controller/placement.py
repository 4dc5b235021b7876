"""The worker pools that a config describes, and the devices that they need.

check_device(config.trainer.device, ranks)
with run_pools(config.trainer, pool_specs(config), config.ray_kwargs.ray_init, logs) as pools:
    critic = spawn(CriticWorker, ..., pool=pools["critic_pool"])
"""

import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from camshaft.config import GLOBAL_POOL, PlacementConfig, PPOConfig, SupervisedConfig
from camshaft.config.layout import Phase
from camshaft.controller.group import Options, Pool, pools
from camshaft.controller.resources import PoolSpec
from camshaft.errors import ConfigError

ROLE_MODULES = ("camshaft.roles",)
"""Modules that worker processes import at startup."""
PHASES: dict[str, Phase] = {
    **dict.fromkeys(
        (
            *("sync_weights", "publish", "publish_base", "portable_snapshot", "receive_weights", "receive_base"),
            "generate_sequences",
        ),
        "generate",
    ),
    **dict.fromkeys(("update_actor", "update_critic", "train_batch"), "update"),
    **dict.fromkeys(("save_checkpoint", "wait_for_checkpoint", "export"), "save"),
}
"""Phase of `trainer.worker_timeouts` of each method of a role. Other methods have no phase."""

RESTORED = ("init_model", "set_environments", "receive_base", "receive_weights")
"""Methods that set the state of a rollout on devices of its own."""

logger = logging.getLogger(__name__)


def pool_specs(config: PPOConfig | SupervisedConfig) -> list[PoolSpec]:
    """Return the pools of a run that host at least one role. A PPO run starts with the pool of the actor."""
    if not isinstance(config, PPOConfig):
        return [global_pool(config.trainer, "model")]
    trainer, pool_of, sizes = config.trainer, config.pools(), config.pool_sizes()
    return [
        PoolSpec(
            name,
            sizes[name].nnodes,
            sizes[name].n_gpus_per_node,
            trainer.device,
            trainer.cpus_per_rank,
            roles=tuple(role for role, pool in pool_of.items() if pool == name),
            max_restarts=config.actor_rollout_ref.rollout.max_restarts if name == pool_of.get("rollout") else 0,
        )
        for name in dict.fromkeys(pool_of.values())
    ]


def global_pool(trainer: PlacementConfig, role: str) -> PoolSpec:
    """Return the pool of a run with a single role."""
    ranks = trainer.nnodes, trainer.n_gpus_per_node, trainer.device, trainer.cpus_per_rank
    return PoolSpec(GLOBAL_POOL, *ranks, roles=(role,))


@contextlib.contextmanager
def run_pools(
    trainer: PlacementConfig, specs: Sequence[PoolSpec], ray_init: Mapping[str, Any], log_folder: Path | None
) -> Generator[dict[str, Pool]]:
    """Start the pools and yield them by name. Workers write their output to files in `log_folder`."""
    logs = None if log_folder is None else str(log_folder.expanduser().absolute())
    options = Options(
        trainer.worker_timeout,
        setting="trainer.worker_timeout",
        limits={method: trainer.worker_limit(phase) for method, phase in PHASES.items()},
        log_folder=logs,
        preload=ROLE_MODULES,
        import_main=False,
        restored=RESTORED,
        ray_init=ray_init,
    )
    backend = trainer.backend()
    for spec in specs:
        if backend != "local" or spec.world_size > 1:
            size = f"{spec.nnodes} x {spec.ranks_per_node} processes"
            output = f"; output in {logs}/{spec.name}_rank*.log" if logs else ""
            logger.info("%s (%s): %s on %s%s", spec.name, ", ".join(spec.roles), size, backend, output)
    with pools(specs, backend, options) as worker_pools:
        yield {pool.spec.name: pool for pool in worker_pools}


def check_device(device: str, ranks: int) -> None:
    """Raise ConfigError unless each rank, of all resource pools, has a device of this kind. All ranks share the CPU."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(
            f"trainer.device={device} is not a device of this torch build; use trainer.device=cpu"
        ) from error
    if kind == "cpu":
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != kind:
        raise ConfigError(f"trainer.device={device}: this machine has no {kind} device; use trainer.device=cpu")
    count = torch.accelerator.device_count()
    if count < ranks:
        raise ConfigError(
            f"the run has {ranks} ranks, and each needs a {kind} device, but this machine has {count}; use "
            f"trainer.n_gpus_per_node={count}, and no separate trainer.resource_pools"
        )
