"""Config of `camshaft ppo`. Methods compute the values that depend on several sections.

config = load_ppo(["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"])
config.needs_critic()                   # False
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from camshaft.config.backends import ranks_per_row
from camshaft.config.layout import ROLLOUT_POOL, PoolConfig, RayConfig, Topology, divide_evenly, pool_sizes
from camshaft.config.model_settings import read_settings
from camshaft.config.schema.algorithm import AlgorithmConfig, estimator_inputs
from camshaft.config.schema.data import DataConfig
from camshaft.config.schema.fields import CommandConfig, KLPenalty, section
from camshaft.config.schema.reward import CustomRewardConfig, RewardModelConfig
from camshaft.config.schema.roles import ActorRolloutRefConfig, CriticConfig
from camshaft.config.schema.trainer import AsyncTrainingConfig, TrainerConfig


@dataclass(frozen=True)
class KLPlan:
    """Uses of the KL divergence from the reference policy in a run."""

    in_reward: KLPenalty | None
    """Estimator of the divergence in the reward. None: the reward does not include it."""
    in_loss: KLPenalty | None
    """Estimator of the divergence in the loss."""
    has_adapter: bool
    """The reference is the actor with its LoRA adapter disabled, and not a model of its own."""

    @property
    def is_used(self) -> bool:
        """True if the run has a reference policy."""
        return self.in_reward is not None or self.in_loss is not None

    @property
    def needs_model(self) -> bool:
        """True if the reference is a separate model."""
        return self.is_used and not self.has_adapter

    @property
    def is_sampled_in_loss(self) -> bool:
        """True if the loss estimates the divergence from the sampled tokens; full is exact over the vocabulary."""
        return self.in_loss not in (None, "full")

    @property
    def needs_log_probs(self) -> bool:
        """True if the run needs reference log-probs of the sampled tokens."""
        return self.in_reward is not None or self.is_sampled_in_loss


class PPOConfig(CommandConfig):
    """All keys of an RL run."""

    data: DataConfig = section("Prompts, length limits and batch sizes.")
    actor_rollout_ref: ActorRolloutRefConfig = section("Actor, rollout and reference policy.")
    critic: CriticConfig = section(
        "Value function. Used only with adv_estimator=gae, unless critic.enable is set.",
        {
            "ppo_epochs": "${actor_rollout_ref.actor.ppo_epochs}",
            "shuffle": "${actor_rollout_ref.actor.shuffle}",
            "loss_agg_mode": "${actor_rollout_ref.actor.loss_agg_mode}",
        },
    )
    reward_model: RewardModelConfig = section("Reward model, which scores complete responses.")
    custom_reward_function: CustomRewardConfig = section("Scoring function.")
    algorithm: AlgorithmConfig = section("Advantage estimation and the KL penalty in the reward.")
    async_training: AsyncTrainingConfig = section("Generation while earlier batches are learned.")
    trainer: TrainerConfig = section("Run length, devices, logging, validation and checkpoints.")
    ray_kwargs: RayConfig = section("Settings of Ray, used with trainer.controller=ray.")

    def needs_critic(self) -> bool:
        """Return True if the run has a critic."""
        enable = self.critic.enable
        return estimator_inputs(self.algorithm.adv_estimator).values if enable is None else enable

    def needs_greedy(self) -> bool:
        """Return True if the advantage estimator needs a greedy response to each prompt (ReMax)."""
        return estimator_inputs(self.algorithm.adv_estimator).baselines

    def needs_sum_pi_squared(self) -> bool:
        """Return True if the advantage estimator needs the sum of squared probabilities (optimal token baseline)."""
        return estimator_inputs(self.algorithm.adv_estimator).probabilities

    def reward_parts(self) -> dict[str, float]:
        """Return the rewards that the advantage estimator reads separately (GDPO), with their weights."""
        functions = self.custom_reward_function.selected()
        return self.algorithm.reward_parts({each.label: each.weight for each in functions if each.label})

    def prompts_per_generation_batch(self) -> int:
        """Return `data.gen_batch_size` if dynamic sampling is enabled and the key is set, else the train batch size."""
        size = self.data.gen_batch_size if self.algorithm.filter_groups.enable else None
        return size or self.data.train_batch_size

    def kl_plan(self) -> KLPlan:
        """Return where the run uses the KL divergence from the reference policy."""
        algorithm, actor = self.algorithm, self.actor_rollout_ref.actor
        return KLPlan(
            algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
            actor.kl_loss_type if actor.use_kl_loss else None,
            self.actor_rollout_ref.model.lora_rank > 0,
        )

    def plays_episodes(self) -> bool:
        """Return True if the policy plays episodes, with an environment or a program."""
        return self.actor_rollout_ref.rollout.multi_turn.plays()

    def needs_function(self) -> bool:
        """Return True if a scoring function is used. It is optional with a reward model or an environment."""
        multi_turn = self.actor_rollout_ref.rollout.multi_turn
        if multi_turn.environment or multi_turn.agent is not None:
            return self.custom_reward_function.is_chosen()
        return not self.reward_model.enable or self.custom_reward_function.is_named()

    def needs_reward_engine(self) -> bool:
        """Return True if the run has a reward model that the built-in worker runs on an engine."""
        return self.reward_model.enable and self.reward_model.worker_cls is None

    def needs_raw_chat(self) -> bool:
        """Return True if the batch includes the messages of the prompts.

        This is the case if the user requests them, or if a reward model with a different chat template reads them.
        """
        reward = self.reward_model
        has_other_template = reward.enable and reward.model.input_tokenizer is not None
        return self.data.return_raw_chat or (has_other_template and not self.data.return_raw_input_ids)

    def max_scored_length(self) -> int:
        """Return the maximum length of a sequence that the reward model scores, in tokens."""
        max_length = self.data.max_prompt_length + self.actor_rollout_ref.rollout.response_length
        return self.reward_model.max_length or max_length

    def data_seed(self) -> int:
        """Return the seed for shuffling the prompts."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    def model_sources(self) -> Iterator[tuple[str, bool]]:
        """Yield the models and tokenizers that the run loads, and whether it needs the weights."""
        model, reward = self.actor_rollout_ref.model, self.reward_model.model
        yield model.source(), not model.random_init
        yield self.tokenizer_path(), False
        if self.needs_critic():
            yield self.critic.model.source(), True
        if self.needs_reward_engine():
            yield reward.source(), True
            if reward.input_tokenizer is not None:
                yield reward.source(reward.input_tokenizer), False

    def tokenizer_path(self) -> str:
        """Return the path of the tokenizer for prompts and responses."""
        return self.actor_rollout_ref.model.source(self.data.tokenizer)

    def pools(self) -> dict[str, str]:
        """Map each role of the run to the name of its resource pool."""
        pools = {"actor_rollout_ref": self.actor_rollout_ref.resource_pool}
        if self.needs_critic():
            pools["critic"] = self.critic.resource_pool
        if self.reward_model.enable:
            pools["reward_model"] = self.reward_model.resource_pool
        if not self.actor_rollout_ref.hybrid_engine:
            pools["rollout"] = self.actor_rollout_ref.rollout.resource_pool
        return pools

    def pool_sizes(self) -> dict[str, PoolConfig]:
        """Map the name of each resource pool to its size. On a CPU, the pool of the rollout has one rank by default."""
        sizes = pool_sizes(self.trainer, self.trainer.resource_pools)
        if self.pools().get("rollout") == ROLLOUT_POOL and self.trainer.device.partition(":")[0] == "cpu":
            sizes.setdefault(ROLLOUT_POOL, PoolConfig(n_gpus_per_node=1))
        return sizes

    def topology(self) -> Topology:
        """Return the number of ranks of each role."""
        sizes = self.pool_sizes()
        num_ranks = {role: sizes.get(name, self.trainer).world_size for role, name in self.pools().items()}
        others = map(num_ranks.get, ("critic", "reward_model", "rollout"))
        return Topology(num_ranks["actor_rollout_ref"], *others)

    def actor_dp_size(self, topology: Topology) -> int:
        """Return the data-parallel size of the actor."""
        return topology.dp_size(self.actor_rollout_ref.actor.ranks_per_row())

    def rollout_dp_size(self, topology: Topology) -> int:
        """Return the number of shards into which the rows of a generation are split."""
        return self.actor_dp_size(topology) if topology.rollout is None else topology.rollout

    def ref_dp_size(self, topology: Topology) -> int:
        """Return the data-parallel size of the reference model."""
        if not self.kl_plan().needs_model:
            return self.actor_dp_size(topology)
        strategy, ref = self.actor_rollout_ref.actor.strategy, self.actor_rollout_ref.ref
        return topology.dp_size(ranks_per_row(strategy, ref.engine_keys(), ref.engine_kwargs))

    def critic_dp_size(self, topology: Topology) -> int:
        """Return the data-parallel size of the critic."""
        return topology.critic_topology().dp_size(self.critic.ranks_per_row())

    def reward_dp_size(self, topology: Topology) -> int:
        """Return the data-parallel size of the reward model."""
        return topology.reward_model_topology().dp_size(self.reward_model.ranks_per_row())

    def old_log_prob_source(self) -> Literal["actor", "update", "rollout"]:
        """Return the source of the old log-probs in the policy loss.

        - `rollout`: the log-probs that the rollout returns (`rollout_correction.bypass_mode`).
        - `update`: the forward pass of the update. This saves one forward pass, and requires that the iteration has a
          single optimizer step, that nothing reads the old log-probs before it, that the model has no dropout, and that
          the batch is not stale: its ratio would be 1.
        - `actor`: a separate forward pass of the actor before the update.

        The actor is not updated during `trainer.critic_warmup`. A caller that needs old log-probs in these iterations
        must compute them with the actor, even if the source is `update`.
        """
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        if algorithm.rollout_correction.bypass_mode:
            return "rollout"
        one_step = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == self.data.train_batch_size
        corrects, penalizes = algorithm.rollout_correction.is_enabled(), algorithm.use_kl_in_reward
        is_stale = self.async_training.max_staleness > 0
        read_earlier = corrects or penalizes or is_stale or self.needs_sum_pi_squared() or self.selects_tokens()
        return "update" if one_step and not read_earlier and not self._may_have_dropout() else "actor"

    def selects_tokens(self) -> bool:
        """Return True if the policy loss selects tokens by statistics over a mini-batch, before the update."""
        correction, loss = self.algorithm.rollout_correction, self.actor_rollout_ref.actor.policy_loss
        if correction.bypass_mode and correction.loss_type == "reinforce":
            return False
        return loss.selects_by_covariance() or loss.top_entropy_quantile < 1

    def _may_have_dropout(self) -> bool:
        """Return True if the actor is trained with dropout, or if its config.json is not on this machine yet."""
        model = self.actor_rollout_ref.model
        settings = read_settings(model.path, model.override_config)
        return settings is None or bool(settings.dropout())

    def needs_log_prob_passes(self) -> bool:
        """Return True if the actor's engine computes log-probs outside of updates.

        These are old log-probs, or with LoRA the log-probs of the reference.
        """
        source, warmup = self.old_log_prob_source(), self.trainer.critic_warmup > 0
        is_reference = self.kl_plan().needs_log_probs and self.kl_plan().has_adapter
        divides = self.algorithm.rollout_correction.needs_mean_weight()
        return source == "actor" or (source == "update" and warmup) or is_reference or divides

    def routing_mode(self) -> Literal["compare", "replay"] | None:
        """Return how the actor uses the expert choices of the rollout; None if the rollout does not return them."""
        if self.actor_rollout_ref.actor.router_replay.mode == "R3":
            return "replay"
        return "compare" if self.actor_rollout_ref.rollout.enable_return_routed_experts else None

    def actor_mini_batch(self) -> int:
        """Return the number of sequences per optimizer step of the actor, summed over all ranks."""
        return self.actor_rollout_ref.actor.ppo_mini_batch_size * self.actor_rollout_ref.rollout.n

    def critic_mini_batch(self) -> int:
        """Return the number of sequences per optimizer step of the critic, summed over all ranks."""
        return self.critic.ppo_mini_batch_size * self.actor_rollout_ref.rollout.n

    def actor_mini_batch_per_rank(self, topology: Topology) -> int:
        """Return the number of sequences per optimizer step of the actor on each data-parallel rank."""
        return divide_evenly(self.actor_mini_batch(), self.actor_dp_size(topology), "actor mini-batch")

    def critic_mini_batch_per_rank(self, topology: Topology) -> int:
        """Return the number of sequences per optimizer step of the critic on each data-parallel rank."""
        return divide_evenly(self.critic_mini_batch(), self.critic_dp_size(topology), "critic mini-batch")
