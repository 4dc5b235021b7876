"""The whole config of an RL run; what its sections say together is a method here.

config = load_ppo(["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"])
config.needs_critic()                   # False
"""

from pydantic import Field

from camshaft.config.algorithm import AlgorithmConfig
from camshaft.config.data import DataConfig
from camshaft.config.fields import Section
from camshaft.config.reward import CustomRewardConfig, RewardModelConfig
from camshaft.config.roles import ActorRolloutRefConfig, CriticConfig
from camshaft.config.topology import Topology
from camshaft.config.trainer import TrainerConfig


class PPOConfig(Section):
    """Everything that an RL run reads."""

    data: DataConfig = Field(description="Prompts, their lengths and the batch sizes.")
    actor_rollout_ref: ActorRolloutRefConfig = Field(description="Actor, rollout and reference.")
    critic: CriticConfig = Field(description="The value function; built for adv_estimator=gae only.")
    reward_model: RewardModelConfig = Field(description="A model that scores whole responses.")
    custom_reward_function: CustomRewardConfig = Field(description="Scoring functions.")
    algorithm: AlgorithmConfig = Field(description="How rewards become advantages.")
    trainer: TrainerConfig = Field(description="The run as a whole.")

    def needs_critic(self) -> bool:
        """Whether advantages need values."""
        return self.algorithm.adv_estimator == "gae"

    def needs_reference(self) -> bool:
        """Whether anything measures the divergence from the reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    def data_seed(self) -> int:
        """Seed of the order of training prompts."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    def tokenizer_path(self) -> str:
        """Folder of the tokenizer that prompts and responses are in."""
        return self.data.tokenizer or self.actor_rollout_ref.model.path

    def actor_mini_batch_per_rank(self, topology: Topology) -> int:
        """Sequences of one optimizer step of the actor on one rank."""
        return self._mini_batch_per_rank(self.actor_rollout_ref.actor.ppo_mini_batch_size, topology)

    def critic_mini_batch_per_rank(self, topology: Topology) -> int:
        """Sequences of one optimizer step of the critic on one rank."""
        return self._mini_batch_per_rank(self.critic.ppo_mini_batch_size, topology)

    def _mini_batch_per_rank(self, num_prompts: int, topology: Topology) -> int:
        return topology.share(num_prompts * self.actor_rollout_ref.rollout.n, "sequences of a mini-batch")
