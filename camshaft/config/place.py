"""Where the processes of a run live: machines, devices, and who starts them.

    config.trainer.backend()                  # "local" or "ray"
    config.pool_specs()                       # of an RL run: each pool that some role lives in, with its roles
    config.topology()                         # how many ranks each of its roles has

Without `trainer.resource_pools` all roles share the devices of the run, one process for each. A pool of its own gives
a role devices of its own, on which it works while the others do.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from camshaft.config.problems import Problem
from camshaft.config.schema.fields import Section, Text

GLOBAL_POOL = "global_pool"
"""The pool that `trainer.nnodes` and `trainer.n_gpus_per_node` describe."""


class PoolConfig(Section):
    """The size of a pool. A pool is the user's, so this default has no line in the YAML files."""

    nnodes: int = Field(default=1, ge=1, description="Machines.")
    n_gpus_per_node: int = Field(ge=1, description="Processes per machine, one per device.")

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node


class PlaceConfig(Section):
    """The keys that `trainer` has in every kind of run."""

    nnodes: int = Field(ge=1, description="Machines.")
    n_gpus_per_node: int = Field(ge=1, description="Processes per machine, one per device.")
    device: Text = Field(description="Where models live: cpu, cuda, or another device that PyTorch knows.")
    controller: Literal["auto", "local", "ray"] = Field(
        description="Who starts the processes: camshaft on this machine, or Ray; auto is Ray for more than one machine."
    )
    cpus_per_rank: float = Field(gt=0, description="CPUs that Ray is asked for with each process; 0.25 is fine.")

    @property
    def world_size(self) -> int:
        """Processes of the run, or of its global pool."""
        return self.nnodes * self.n_gpus_per_node

    def backend(self) -> str:
        """The controller's backend."""
        if self.controller != "auto":
            return self.controller
        return "ray" if self.nnodes > 1 else "local"


class RayConfig(Section):
    """Read where Ray is the controller."""

    ray_init: dict[str, Any] = Field(
        description="Arguments of ray.init: address (else RAY_ADDRESS, a cluster that runs here, or a new one),"
        " num_cpus, runtime_env and so on."
    )


def pool_sizes(trainer: PlaceConfig, pools: Mapping[str, PoolConfig]) -> dict[str, PoolConfig]:
    """Every pool that a role may name."""
    return {
        GLOBAL_POOL: PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node),
        **pools,
    }


def place_problems(trainer: PlaceConfig, pools: Mapping[str, PoolConfig], used: Mapping[str, str]) -> Iterator[Problem]:
    """What is wrong with where roles live; `used` says which key names which pool."""
    if GLOBAL_POOL in pools:
        sentence = "is the pool of trainer.nnodes and trainer.n_gpus_per_node. Give yours another name."
        yield Problem(f"trainer.resource_pools.{GLOBAL_POOL}", pools[GLOBAL_POOL].model_dump(), sentence)
    for key, name in used.items():
        if name != GLOBAL_POOL and name not in pools:
            known = ", ".join((GLOBAL_POOL, *pools))
            sentence = (
                f"there is no such pool (known: {known}). Type '+trainer.resource_pools.{name}.n_gpus_per_node=1' to"
                f" make it, or {key}={GLOBAL_POOL}."
            )
            yield Problem(key, name, sentence)
    for name in pools:
        if name != GLOBAL_POOL and name not in used.values():
            sentence = "no role lives there. Name it in actor_rollout_ref.resource_pool, critic.resource_pool or "
            sentence += "reward_model.resource_pool, or leave it out."
            yield Problem(f"trainer.resource_pools.{name}", pools[name].model_dump(), sentence)
    machines = max((pool_sizes(trainer, pools)[name].nnodes for name in used.values() if name in pools), default=1)
    if trainer.backend() == "local" and max(machines, trainer.nnodes) > 1:
        sentence = "starts processes on this machine alone. Type trainer.controller=ray."
        yield Problem("trainer.controller", trainer.controller, sentence, ("trainer.nnodes",))
