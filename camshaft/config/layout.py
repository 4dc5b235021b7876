"""Placement and ranks: machines, devices, resource pools, and how a batch is split over ranks.

    config.trainer.backend()                  # "local" or "ray"
    config.pools()                            # the resource pool of each role of an RL run
    config.topology().dp_size(2)              # data-parallel size if two ranks compute each row

Without `trainer.resource_pools` all roles share the devices of the run, with one process per device. A role in another
pool has separate devices and computes in parallel with the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from camshaft.config.schema.fields import Section, Text
from camshaft.errors import ConfigError

GLOBAL_POOL = "global_pool"
"""The pool that `trainer.nnodes` and `trainer.n_gpus_per_node` describe."""


class PoolConfig(Section):
    """The size of a resource pool. Pools are user-defined, so this default is not in the YAML files."""

    nnodes: int = Field(default=1, ge=1, description="Number of machines.")
    n_gpus_per_node: int = Field(ge=1, description="Number of processes per machine. Each process uses one device.")

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node


class PlacementConfig(Section):
    """Keys of the section `trainer` in every kind of run: machines, devices and controller."""

    nnodes: int = Field(ge=1, description="Number of machines.")
    n_gpus_per_node: int = Field(ge=1, description="Number of processes per machine. Each process uses one device.")
    device: Text = Field(description="Device type that models run on: cpu, cuda, or another PyTorch device type.")
    controller: Literal["auto", "local", "ray"] = Field(
        description="Launcher of the processes. local starts them on this machine; ray starts them on a Ray cluster; "
        "auto selects ray if the run uses more than one machine."
    )
    cpus_per_rank: float = Field(
        gt=0, description="Number of CPUs that Ray reserves for each process. Fractions are allowed."
    )

    @property
    def world_size(self) -> int:
        """Number of ranks of the run, or of its global pool."""
        return self.nnodes * self.n_gpus_per_node

    def backend(self) -> str:
        """Return the controller backend, `local` or `ray`."""
        if self.controller != "auto":
            return self.controller
        return "ray" if self.nnodes > 1 else "local"


class RayConfig(Section):
    """Settings of the Ray controller."""

    ray_init: dict[str, Any] = Field(
        description="Arguments of ray.init, such as address, num_cpus and runtime_env. Without an address, Ray "
        "connects to RAY_ADDRESS or to a cluster that runs on this machine, and otherwise starts a new cluster."
    )


def pool_sizes(trainer: PlacementConfig, pools: Mapping[str, PoolConfig]) -> dict[str, PoolConfig]:
    """Return the size of the global pool and of every pool in `trainer.resource_pools`, by name."""
    return {
        GLOBAL_POOL: PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node),
        **pools,
    }


@dataclass(frozen=True)
class Topology:
    """The number of ranks of each role. Ranks per row are a property of each role's engine."""

    world_size: int = 1
    """Ranks of the actor's pool, which roles without a pool share."""
    critic: int | None = None
    reward_model: int | None = None

    def dp_size(self, ranks_per_row: int = 1) -> int:
        """Return the data-parallel size: the number of rank groups that compute different rows."""
        return max(1, self.world_size // ranks_per_row)

    def of_critic(self) -> "Topology":
        """Return the topology of the critic's pool."""
        return Topology(self.critic or self.world_size)

    def of_reward_model(self) -> "Topology":
        """Return the topology of the reward model's pool."""
        return Topology(self.reward_model or self.world_size)


def share(count_global: int, dp_size: int, what: str) -> int:
    """Return the count per rank; raise a `ConfigError` if the global count is not divisible by `dp_size`."""
    quotient, remainder = divmod(count_global, dp_size)
    if remainder or not quotient:
        raise ConfigError(f"{what}: {count_global} do not split evenly over {dp_size} ranks")
    return quotient


def micro_batch_per_rank(per_gpu: int | None, count_global: int, dp_size: int) -> int:
    """Return the sequences per forward pass on one rank: `per_gpu`, or the share of the deprecated global count."""
    return per_gpu if per_gpu is not None else share(count_global, dp_size, "sequences of a micro-batch")
