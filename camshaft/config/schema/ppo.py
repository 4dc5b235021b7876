"""The whole config of an RL run; what its sections say together is a method here.

config = load_ppo(["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"])
config.needs_critic()                   # False
"""

from typing import Literal

from pydantic import Field

from camshaft.config.place import RayConfig, pool_sizes
from camshaft.config.schema.algorithm import AlgorithmConfig
from camshaft.config.schema.data import DataConfig
from camshaft.config.schema.fields import Section
from camshaft.config.schema.reward import CustomRewardConfig, RewardModelConfig
from camshaft.config.schema.roles import ActorRolloutRefConfig, CriticConfig
from camshaft.config.schema.trainer import TrainerConfig
from camshaft.config.topology import Topology, share


class PPOConfig(Section):
    """Everything that an RL run reads."""

    data: DataConfig = Field(description="Prompts, their lengths and the batch sizes.")
    actor_rollout_ref: ActorRolloutRefConfig = Field(description="Actor, rollout and reference.")
    critic: CriticConfig = Field(description="The value function; built for adv_estimator=gae only, unless told so.")
    reward_model: RewardModelConfig = Field(description="A model that scores whole responses.")
    custom_reward_function: CustomRewardConfig = Field(description="Scoring functions.")
    algorithm: AlgorithmConfig = Field(description="How rewards become advantages.")
    trainer: TrainerConfig = Field(description="The run as a whole.")
    ray_kwargs: RayConfig = Field(description="For trainer.controller=ray.")

    def needs_critic(self) -> bool:
        """Whether advantages need values."""
        return self.algorithm.adv_estimator == "gae" if self.critic.enable is None else self.critic.enable

    def needs_greedy(self) -> bool:
        """Whether advantages compare with a greedy response to each prompt."""
        return self.algorithm.adv_estimator == "remax"

    def generated_together(self) -> int:
        """Prompts that are generated together."""
        asked = self.data.gen_batch_size if self.algorithm.filter_groups.enable else None
        return asked or self.data.train_batch_size

    def needs_reference(self) -> bool:
        """Whether anything measures the divergence from the reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    def needs_full_kl_in_reward(self) -> bool:
        """Whether the reward compares actor and reference over the whole vocabulary, and not on the tokens drawn."""
        return self.algorithm.use_kl_in_reward and self.algorithm.kl_penalty == "full"

    def needs_full_kl_loss(self) -> bool:
        """Whether the actor's loss does."""
        return self.actor_rollout_ref.actor.use_kl_loss and self.actor_rollout_ref.actor.kl_loss_type == "full"

    def needs_sampled_kl_loss(self) -> bool:
        """Whether the actor's loss compares the two on the tokens drawn."""
        return self.actor_rollout_ref.actor.use_kl_loss and not self.needs_full_kl_loss()

    def needs_ref_log_prob(self) -> bool:
        """Whether the reference is asked before the update: for the reward, or for a loss of the tokens drawn."""
        return self.algorithm.use_kl_in_reward or self.needs_sampled_kl_loss()

    def needs_reference_model(self) -> bool:
        """Whether that policy is a model of its own; with an adapter it is the actor's model without it."""
        return self.needs_reference() and self.actor_rollout_ref.model.lora_rank == 0

    def needs_function(self) -> bool:
        """Whether a scoring function scores; only a reward model can do without one."""
        return not self.reward_model.enable or self.custom_reward_function.is_named()

    def needs_reward_engine(self) -> bool:
        """Whether a reward model of ours scores, and not a worker of the user's own."""
        return self.reward_model.enable and self.reward_model.worker_cls is None

    def needs_raw_chat(self) -> bool:
        """Whether prompts keep their messages: asked for, or what a reward model with another template reads."""
        reward = self.reward_model
        reads = reward.enable and reward.model.input_tokenizer is not None and not self.data.return_raw_input_ids
        return self.data.return_raw_chat or reads

    def longest_scored(self) -> int:
        """Most tokens that the reward model reads of one row."""
        longest = self.data.max_prompt_length + self.actor_rollout_ref.rollout.response_length
        return self.reward_model.max_length or longest

    def data_seed(self) -> int:
        """Seed of the order of training prompts."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    def tokenizer_path(self) -> str:
        """Folder of the tokenizer that prompts and responses are in."""
        return self.data.tokenizer or self.actor_rollout_ref.model.path

    def pools(self) -> dict[str, str]:
        """The pool of each role that the run has."""
        found = {"actor_rollout_ref": self.actor_rollout_ref.resource_pool}
        if self.needs_critic():
            found["critic"] = self.critic.resource_pool
        if self.reward_model.enable:
            found["reward_model"] = self.reward_model.resource_pool
        return found

    def topology(self) -> Topology:
        """How many ranks each role has."""
        sizes = pool_sizes(self.trainer, self.trainer.resource_pools)
        ranks = {role: sizes.get(name, self.trainer).world_size for role, name in self.pools().items()}
        return Topology(ranks["actor_rollout_ref"], ranks.get("critic"), ranks.get("reward_model"))

    def actor_dp_size(self, topology: Topology) -> int:
        """Ranks, or groups of ranks, that split the actor's batches."""
        return topology.dp_size(self.actor_rollout_ref.actor.ranks_per_row())

    def ref_dp_size(self, topology: Topology) -> int:
        """The same of the reference."""
        section = self.actor_rollout_ref.ref if self.needs_reference_model() else self.actor_rollout_ref.actor
        return topology.dp_size(section.ranks_per_row())

    def critic_dp_size(self, topology: Topology) -> int:
        """The same of the critic."""
        return topology.of_critic().dp_size(self.critic.ranks_per_row())

    def reward_dp_size(self, topology: Topology) -> int:
        """The same of the reward model."""
        return topology.of_reward_model().dp_size(self.reward_model.ranks_per_row())

    def old_log_probs(self) -> Literal["actor", "update", "rollout"]:
        """Source of the old log-probs of the policy loss.

        `rollout`: the log-probs of the generator (`rollout_correction.bypass_mode`). `update`: the forward pass of the
        update itself, if a batch is a single optimizer step and nothing else reads them before it. `actor`: a forward
        pass of the actor before the update. In steps of `trainer.critic_warmup` no update runs, so `update` has no
        source there and a caller that needs the values computes them with the actor.
        """
        if self.algorithm.rollout_correction.bypass_mode:
            return "rollout"
        return "update" if self.learns_at_once() else "actor"

    def learns_at_once(self) -> bool:
        """Whether a batch is one optimizer step of the actor, so that the update's own forward pass has the old
        log-probs, and nothing asks for them before it."""
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        correction = algorithm.rollout_correction
        one_step = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == self.data.train_batch_size
        return one_step and not (correction.is_on() or correction.bypass_mode or algorithm.use_kl_in_reward)

    def actor_mini_batch(self) -> int:
        """Sequences of one optimizer step of the actor, over all ranks."""
        return self.actor_rollout_ref.actor.ppo_mini_batch_size * self.actor_rollout_ref.rollout.n

    def critic_mini_batch(self) -> int:
        """The same of the critic."""
        return self.critic.ppo_mini_batch_size * self.actor_rollout_ref.rollout.n

    def actor_mini_batch_per_rank(self, topology: Topology) -> int:
        """Sequences of one optimizer step of the actor on one rank."""
        return share(self.actor_mini_batch(), self.actor_dp_size(topology), "sequences of a mini-batch")

    def critic_mini_batch_per_rank(self, topology: Topology) -> int:
        """The same of the critic."""
        return share(self.critic_mini_batch(), self.critic_dp_size(topology), "sequences of a mini-batch")
