"""Placement of a run: machines, devices, resource pools, and data-parallel sizes.

    config.trainer.backend()                  # "local" or "ray"
    config.pools()                            # the resource pool of each role of an RL run
    config.topology().dp_size(2)              # the data-parallel size with a model-parallel size of 2

By default all roles share the devices of the global pool, and each device runs one process. A role in a pool of
`trainer.resource_pools` uses separate devices and computes in parallel with the other roles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from camshaft.config.schema.fields import Auto, Count, Section, Text, key, section
from camshaft.errors import ConfigError
from camshaft.subprocesses import Limit

GLOBAL_POOL = "global_pool"
"""Name of the resource pool that `trainer.nnodes` and `trainer.n_gpus_per_node` define."""
ROLLOUT_POOL = "rollout"
"""Default name of the resource pool of a rollout on devices of its own. On a CPU, it need not be defined."""


class PoolConfig(Section):
    """Size of a resource pool."""

    nnodes: int = key(1, "Number of machines.", ge=1)
    n_gpus_per_node: Count = Field(description="Number of processes per machine. Each process uses one device.")

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node


class WorkerTimeouts(Section):
    """Time limits of single phases, which override `worker_timeout`."""

    generate: PositiveFloat | None = key(
        None, "Time limit, in seconds, of a weight sync and of a generation. null applies worker_timeout."
    )
    update: PositiveFloat | None = key(
        None, "Time limit, in seconds, of an update of the actor or critic. null applies worker_timeout."
    )
    save: PositiveFloat | None = key(
        None,
        "Time limit, in seconds, of saving one role, including its copy to default_hdfs_dir. null applies "
        "worker_timeout.",
    )


Phase = Literal["generate", "update", "save"]
"""Fields of `WorkerTimeouts`."""


class PlacementConfig(Section):
    """Keys of the section `trainer` that all commands share: machines, devices and controller."""

    nnodes: Count = key(1, "Number of machines.")
    n_gpus_per_node: Annotated[Count, Auto()] = key(
        "auto",
        "Number of processes per machine. Each process uses one device. auto uses all accelerators of the machine on "
        "which the command runs, or one process on a CPU.",
        short=("devices", "devices (processes) per machine"),
    )
    device: Annotated[Text, Auto()] = key(
        "auto",
        "Device type that models run on: cpu, cuda, or another PyTorch device type. auto selects the accelerator of "
        "the machine on which the command runs, or cpu if it has none.",
        short=("device", "cpu, cuda, or another PyTorch device"),
    )
    controller: Literal["auto", "local", "ray"] = key(
        "auto",
        "Launcher of the processes. local starts them on this machine; ray starts them on a Ray cluster; auto "
        "selects ray if the run uses more than one machine.",
    )
    cpus_per_rank: PositiveFloat = key(1.0, "Number of CPUs that Ray reserves for each process. Fractions are allowed.")
    worker_timeout: PositiveFloat = key(
        3600.0,
        "Time limit, in seconds, of a call to another process, such as a training rank, a generator or a server. The "
        "run ends with an error that names the process. Waits are logged after 10, 20, 40, ... seconds.",
    )
    worker_timeouts: WorkerTimeouts = section("Time limits of single phases, which override worker_timeout.")

    @property
    def world_size(self) -> int:
        """Number of ranks in the global pool."""
        return self.nnodes * self.n_gpus_per_node

    def worker_limit(self, phase: Phase) -> Limit:
        """Return the time limit of calls to other processes in a phase."""
        overrides = self.worker_timeouts
        seconds = {"generate": overrides.generate, "update": overrides.update, "save": overrides.save}[phase]
        if seconds is None:
            return Limit(self.worker_timeout, f"trainer.worker_timeout={self.worker_timeout:g}")
        return Limit(seconds, f"trainer.worker_timeouts.{phase}={seconds:g}")

    def backend(self) -> str:
        """Return the controller backend, `local` or `ray`."""
        if self.controller != "auto":
            return self.controller
        return "ray" if self.nnodes > 1 else "local"


class RayConfig(Section):
    """Settings of the Ray controller."""

    ray_init: dict[str, Any] = key(
        {},
        "Arguments of ray.init, such as address, num_cpus and runtime_env. Without an address, Ray connects to "
        "RAY_ADDRESS or to a cluster that runs on this machine, and otherwise starts a new cluster.",
    )


def pool_sizes(trainer: PlacementConfig, pools: Mapping[str, PoolConfig]) -> dict[str, PoolConfig]:
    """Map the name of each resource pool, including the global pool, to its size."""
    return {GLOBAL_POOL: PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node), **pools}


@dataclass(frozen=True)
class Topology:
    """Number of ranks of each role."""

    world_size: int = 1
    """Number of ranks in the pool of the actor. Roles without a separate pool use the same ranks."""
    critic: int | None = None
    """Number of ranks in the pool of the critic. None: the run has no critic."""
    reward_model: int | None = None
    """Number of ranks in the pool of the reward model. None: the run has no reward model."""
    rollout: int | None = None
    """Number of ranks in the pool of the rollout. None: the rollout uses the ranks of the actor."""

    def dp_size(self, ranks_per_row: int = 1) -> int:
        """Return the data-parallel size, if groups of `ranks_per_row` ranks process the same rows."""
        return max(1, self.world_size // ranks_per_row)

    def critic_topology(self) -> "Topology":
        """Return the topology of the critic's pool."""
        return Topology(self.critic or self.world_size)

    def reward_model_topology(self) -> "Topology":
        """Return the topology of the reward model's pool."""
        return Topology(self.reward_model or self.world_size)

    def rollout_topology(self) -> "Topology":
        """Return the topology of the rollout's pool."""
        return Topology(self.rollout or self.world_size)


def divide_evenly(count_global: int, dp_size: int, name: str) -> int:
    """Return the count per data-parallel rank; raise a `ConfigError` if the global count is not divisible.

    `name` describes the count in the error message.
    """
    quotient, remainder = divmod(count_global, dp_size)
    if remainder or not quotient:
        raise ConfigError(f"{name}: {count_global} sequences are not divisible by {dp_size} data-parallel ranks")
    return quotient


def micro_batch_per_rank(per_gpu: int | None, count_global: int | None, dp_size: int) -> int:
    """Return the number of sequences per forward pass on each rank.

    This is `per_gpu`, or an equal share of the deprecated global count if `per_gpu` is None.
    """
    if per_gpu is not None:
        return per_gpu
    assert count_global is not None, "validated by the config"
    return divide_evenly(count_global, dp_size, "micro-batch")
