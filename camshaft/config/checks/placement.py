"""Checks of resource pools, the controller, and the classes of workers."""

from collections.abc import Iterator, Mapping

from camshaft.config.errors import Problem, check_name
from camshaft.config.layout import GLOBAL_POOL, ROLLOUT_POOL, PlacementConfig, PoolConfig, pool_sizes
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.trainer import pool_key

HYBRID, ROLLOUT_KEY = "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.rollout.resource_pool"


def check_ppo_placement(config: PPOConfig) -> Iterator[Problem]:
    """Check the resource pools, the controller and the workers of an RL run."""
    pools = {f"{role}.resource_pool": name for role, name in config.pools().items() if role != "rollout"}
    defined = dict(config.trainer.resource_pools)
    if not config.actor_rollout_ref.hybrid_engine:
        yield from _check_rollout_pool(config, pools)
        pools[ROLLOUT_KEY] = config.actor_rollout_ref.rollout.resource_pool
        defined = {name: size for name, size in config.pool_sizes().items() if name != GLOBAL_POOL or name in defined}
    yield from check_placement(config.trainer, defined, pools)
    workers = {"actor_rollout_ref": config.actor_rollout_ref.worker_cls, "critic": config.critic.worker_cls}
    for role, name in workers.items():
        if name is not None:
            yield from check_name(f"{role}.worker_cls", name, (), "roles")


def _check_rollout_pool(config: PPOConfig, others: Mapping[str, str]) -> Iterator[Problem]:
    """Check that the pool of a rollout on devices of its own belongs to no other role."""
    name = config.actor_rollout_ref.rollout.resource_pool
    users = [key for key, other in others.items() if other == name]
    if users:
        message = (
            f"{HYBRID}=false generates on devices of its own, but {' and '.join(users)} selects the same pool. Set "
            f"{HYBRID}=true, or {ROLLOUT_KEY} to a pool that no other role selects, such as {ROLLOUT_POOL}."
        )
        yield Problem(ROLLOUT_KEY, name, message, (HYBRID, *users))


def check_placement(
    trainer: PlacementConfig, pools: Mapping[str, PoolConfig] | None = None, used: Mapping[str, str] | None = None
) -> Iterator[Problem]:
    """Check the resource pools and the controller. `used` maps config keys to the names of the pools they select."""
    pools, used = pools or {}, used or {}
    if GLOBAL_POOL in pools:
        message = (
            "this name is reserved for the pool that trainer.nnodes and trainer.n_gpus_per_node define. "
            "Rename the pool."
        )
        yield Problem(pool_key(GLOBAL_POOL), pools[GLOBAL_POOL].model_dump(), message)
    for key, name in used.items():
        if name != GLOBAL_POOL and name not in pools:
            message = (
                f"unknown resource pool; the pools are {', '.join((GLOBAL_POOL, *pools))}. Set {key}={GLOBAL_POOL}, or "
                f"add the pool with {pool_key(name)}.n_gpus_per_node=1."
            )
            yield Problem(key, name, message)
    for name in pools:
        if name != GLOBAL_POOL and name not in used.values():
            message = (
                "no role uses this pool. Select it with actor_rollout_ref.resource_pool, critic.resource_pool, "
                f"reward_model.resource_pool, or {ROLLOUT_KEY} and {HYBRID}=false, or remove it."
            )
            yield Problem(pool_key(name), pools[name].model_dump(), message)
    machines = max((pool_sizes(trainer, pools)[name].nnodes for name in used.values() if name in pools), default=1)
    if trainer.backend() == "local" and max(machines, trainer.nnodes) > 1:
        message = "the local controller starts processes on this machine only. Set trainer.controller=ray."
        yield Problem("trainer.controller", trainer.controller, message, ("trainer.nnodes",))
