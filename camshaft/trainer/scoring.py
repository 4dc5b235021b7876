"""What scores the responses of an RL run: scoring functions, a reward model, a penalty for length; whether they can.

    rewards = build_rewards(config.custom_reward_function)      # functions; camshaft generate has no more
    rewards = run_rewards(config)                               # those, beside a reward model or without
    batch = model_scores(batch, reward_model, ranks)            # `rm_scores`, which `run_rewards(config).score` reads
    batch = with_scores(batch, rewards.score(batch, decode))    # `token_level_scores`

Used by training, validation and `camshaft generate`.
"""

from __future__ import annotations

from torch import Tensor

from camshaft.config import CustomRewardConfig, PPOConfig
from camshaft.dataproto import DataProto
from camshaft.errors import RewardError
from camshaft.plugins import REWARDS, import_attribute
from camshaft.rewards.auto import SOURCES, reward_for
from camshaft.rewards.combined import CombinedRewards
from camshaft.rewards.manager import RewardManager, RewardResult
from camshaft.rewards.overlong import OverlongPenalty
from camshaft.roles import RewardModelWorker

READ_BY_MODEL = ("prompts", "responses", "response_mask", "raw_prompt", "raw_input_ids")
"""What ours reads, where it is there."""
ABOUT_ROWS = ("uid", "prompt_id", "data_source", "ground_truth", "extra_info")
"""What else a worker of the user's own may want to know."""


def build_rewards(custom: CustomRewardConfig) -> RewardManager:
    """The scoring function of the config, loaded in a process of its own."""
    return RewardManager(
        custom.path,
        custom.function_name(),
        custom.reward_kwargs,
        timeout=custom.timeout,
        num_workers=custom.num_workers,
        on_error=custom.on_error,
        batched=custom.batched,
    )


def run_rewards(config: PPOConfig) -> RewardManager | CombinedRewards | OverlongPenalty:
    """All that scores in an RL run."""
    overlong, limit = config.reward_model.overlong_buffer, config.actor_rollout_ref.rollout.response_length
    rewards = _given(config)
    if not overlong.enable:
        return rewards
    return OverlongPenalty(rewards, limit=limit, buffer=overlong.len, factor=overlong.penalty_factor, log=overlong.log)


def _given(config: PPOConfig) -> RewardManager | CombinedRewards:
    """What functions and model give."""
    if not config.reward_model.enable:
        return build_rewards(config.custom_reward_function)
    function = build_rewards(config.custom_reward_function) if config.needs_function() else None
    return CombinedRewards(function, config.reward_model.weight)


def model_scores(batch: DataProto, model: RewardModelWorker | None, ranks: int) -> DataProto:
    """`batch` with the scores of the reward model on so many ranks, if there is one.

    Rows are added so that every rank gets as many, and taken away again.
    """
    if model is None:
        return batch
    asked = batch.select(*(name for name in (*READ_BY_MODEL, *ABOUT_ROWS) if name in batch))
    padded, added = asked.pad_to_divisor(ranks)
    return batch.union(DataProto(model.compute_rm_score(padded).unpad(added).columns))


def with_scores(batch: DataProto, result: RewardResult) -> DataProto:
    """`batch` with its scores. A row that is dropped stays, and none of its tokens counts any more.

    So does a row that has nothing to be compared with, because the scoring of its baseline failed.
    """
    batch, kept = batch.with_columns(token_level_scores=result.token_level_scores), result.kept
    if "reward_baselines" in batch:
        baselines = batch["reward_baselines"]
        kept = kept & ~baselines.isnan()
        batch = batch.with_columns(reward_baselines=baselines.nan_to_num(0.0))
    if kept.all():
        return batch
    check_left(kept, result, "responses")
    mask = batch.ragged("response_mask")
    return batch.with_columns(response_mask=mask.like(mask.values & kept[mask.row_ids()]))


def check_left(kept: Tensor, result: RewardResult, what: str) -> None:
    """An error if no row is left, all for want of a score."""
    if len(kept) and not kept.any():
        raise RewardError(
            f"the reward function failed on all {len(kept)} {what} of a step, and custom_reward_function.on_error=drop "
            f"leaves nothing to learn from. The first failure is at {result.failures[0]}"
        )


def check_scorable(prompts: DataProto, custom: CustomRewardConfig, beside_model: bool = False) -> None:
    """Can a scoring function of ours score these rows? One of the user's own is not second-guessed."""
    if custom.path is not None or not len(prompts):
        return
    own = "custom_reward_function.path=my_reward.py for a function of your own"
    if beside_model:
        own += ", or custom_reward_function.name=null to score with the reward model alone"
    chosen = {str(source): reward_for(source) for source in prompts["data_source"]}
    unknown = sorted(source for source, name in chosen.items() if name is None)
    if custom.function_name() == "auto" and unknown:
        raise RewardError(
            f"no scoring function goes with data_source {', '.join(unknown[:5])} (known: {', '.join(SOURCES)}). Type "
            f"custom_reward_function.name=exact_match to compare with the ground truth, or {own}"
        )
    if custom.function_name() == "auto":
        for name in sorted({name for name in chosen.values() if name is not None}):
            import_attribute(REWARDS[name])  # says what to install for it, before anything is started
    without = [uid for uid, truth in zip(prompts["uid"], prompts["ground_truth"], strict=True) if truth is None]
    if without:
        raise RewardError(
            f"{len(without)} of {len(prompts)} rows have nothing to compare a response with, first row "
            f"{without[0]}: give the files a struct 'reward_model' with 'ground_truth', or a column 'ground_truth'; or "
            f"type {own}"
        )
