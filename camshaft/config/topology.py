"""How many ranks split a batch, and what one of them gets.

topology = Topology(world_size=8)
config.actor_dp_size(topology)          # 4, where two ranks compute each row together
"""

from dataclasses import dataclass

from camshaft.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """The ranks of a run. How many of them compute one row together is a matter of each role."""

    world_size: int = 1
    """Of the actor's pool, and of every role that has no other."""
    critic: int | None = None
    reward_model: int | None = None

    def dp_size(self, ranks_per_row: int = 1) -> int:
        """Ranks, or groups of ranks, with rows of their own."""
        return max(1, self.world_size // ranks_per_row)

    def of_critic(self) -> "Topology":
        """The ranks of the critic's pool."""
        return Topology(self.critic or self.world_size)

    def of_reward_model(self) -> "Topology":
        """The ranks of the reward model's pool."""
        return Topology(self.reward_model or self.world_size)


def share(count_global: int, dp_size: int, what: str) -> int:
    """One rank's part of a global count; an error where it does not come out even."""
    part, rest = divmod(count_global, dp_size)
    if rest or not part:
        raise ConfigError(f"{what}: {count_global} do not split evenly over {dp_size} ranks")
    return part


def micro_batch_per_rank(per_gpu: int | None, older_global: int, dp_size: int) -> int:
    """Sequences of one pass on one rank: `per_gpu` if set, else the rank's share of the older key's number."""
    return per_gpu if per_gpu is not None else share(older_global, dp_size, "sequences of a micro-batch")
