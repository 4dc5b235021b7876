"""Scoring of responses: reward functions, the reward model, the length penalty, and checks of the data for them.

    rewards = build_rewards(config.custom_reward_function)      # only reward functions, for camshaft generate
    rewards = run_rewards(config)                               # reward functions, reward model and length penalty
    batch = model_scores(batch, reward_model, ranks)            # adds `rm_scores`, an input of `rewards.score`
    batch = with_scores(batch, rewards.score(batch, decode))    # adds `token_level_scores`

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
"""Columns that the built-in reward model reads, if present."""
ABOUT_ROWS = ("uid", "prompt_id", "data_source", "ground_truth", "extra_info")
"""Further columns that a user's reward model may read."""


def build_rewards(custom: CustomRewardConfig) -> RewardManager:
    """Load the configured reward function in its own processes."""
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
    """Build the scoring of a PPO run: reward functions, reward model and length penalty."""
    overlong, limit = config.reward_model.overlong_buffer, config.actor_rollout_ref.rollout.response_length
    rewards = _rewards(config)
    if not overlong.enable:
        return rewards
    return OverlongPenalty(rewards, limit=limit, buffer=overlong.len, factor=overlong.penalty_factor, log=overlong.log)


def _rewards(config: PPOConfig) -> RewardManager | CombinedRewards:
    """Build the scoring without the length penalty."""
    if not config.reward_model.enable:
        return build_rewards(config.custom_reward_function)
    function = build_rewards(config.custom_reward_function) if config.needs_function() else None
    return CombinedRewards(function, config.reward_model.weight)


def model_scores(batch: DataProto, model: RewardModelWorker | None, ranks: int) -> DataProto:
    """Add the scores of the reward model, if there is one, which runs on `ranks` ranks.

    Rows are padded to the same number per rank, and the padding is removed from the result.
    """
    if model is None:
        return batch
    inputs = batch.select(*(name for name in (*READ_BY_MODEL, *ABOUT_ROWS) if name in batch))
    padded, added = inputs.pad_to_divisor(ranks)
    return batch.union(DataProto(model.compute_rm_score(padded).unpad(added).columns))


def with_scores(batch: DataProto, result: RewardResult) -> DataProto:
    """Add the scores. Dropped rows are kept in the batch with a mask that is false at all tokens.

    A row is dropped if its scoring failed (`on_error=drop`) or that of its greedy baseline.
    """
    batch, kept = batch.with_columns(token_level_scores=result.token_level_scores), result.kept
    if "reward_baselines" in batch:
        baselines = batch["reward_baselines"]
        kept = kept & ~baselines.isnan()
        batch = batch.with_columns(reward_baselines=baselines.nan_to_num(0.0))
    if kept.all():
        return batch
    check_remaining(kept, result, "responses")
    mask = batch.ragged("response_mask")
    return batch.with_columns(response_mask=mask.like(mask.values & kept[mask.row_ids()]))


def check_remaining(kept: Tensor, result: RewardResult, noun: str) -> None:
    """Raise an error if all rows were dropped."""
    if len(kept) and not kept.any():
        raise RewardError(
            f"the reward function failed on all {len(kept)} {noun} of a step, and custom_reward_function.on_error=drop "
            f"drops them all; first failure: {result.failures[0]}"
        )


def check_scorable(prompts: DataProto, custom: CustomRewardConfig, beside_model: bool = False) -> None:
    """Check that a built-in reward function can score these rows; functions of the user are not checked."""
    if custom.path is not None or not len(prompts):
        return
    alternative = "custom_reward_function.path=my_reward.py for your own function"
    if beside_model:
        alternative += ", or custom_reward_function.name=null to score with the reward model only"
    chosen = {str(source): reward_for(source) for source in prompts["data_source"]}
    unknown = sorted(source for source, name in chosen.items() if name is None)
    if custom.function_name() == "auto" and unknown:
        raise RewardError(
            f"data_source {', '.join(unknown[:5])} has no built-in reward function (known: {', '.join(SOURCES)}); use "
            f"custom_reward_function.name=exact_match to compare with the ground truth, or {alternative}"
        )
    if custom.function_name() == "auto":
        for name in sorted({name for name in chosen.values() if name is not None}):
            import_attribute(REWARDS[name])  # raises early if an optional library is missing
    without = [uid for uid, truth in zip(prompts["uid"], prompts["ground_truth"], strict=True) if truth is None]
    if without:
        raise RewardError(
            f"{len(without)} of {len(prompts)} rows have no ground truth, first row {without[0]}; add a struct "
            f"'reward_model' with 'ground_truth' or a column 'ground_truth' to the files, or use {alternative}"
        )
