"""What scores the responses of an RL run: scoring functions, a reward model, or both; and whether they can.

    rewards = build_rewards(config.custom_reward_function)      # functions; camshaft generate has no more
    rewards = run_rewards(config)                               # those, beside a reward model or without
    batch = model_scores(batch, reward_model, ranks)            # `rm_scores`, which `run_rewards(config).score` reads

Used by training, validation and `camshaft generate`.
"""

from __future__ import annotations

from camshaft.config import CustomRewardConfig, PPOConfig
from camshaft.dataproto import DataProto
from camshaft.errors import RewardError
from camshaft.rewards.auto import SOURCES
from camshaft.rewards.combined import CombinedRewards
from camshaft.rewards.manager import RewardManager
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
    )


def run_rewards(config: PPOConfig) -> RewardManager | CombinedRewards:
    """All that scores in an RL run."""
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


def check_scorable(prompts: DataProto, custom: CustomRewardConfig, beside_model: bool = False) -> None:
    """Can a scoring function of ours score these rows? One of the user's own is not second-guessed."""
    if custom.path is not None or not len(prompts):
        return
    own = "custom_reward_function.path=my_reward.py for a function of your own"
    if beside_model:
        own += ", or custom_reward_function.name=null to score with the reward model alone"
    unknown = sorted({str(source) for source in prompts["data_source"] if source not in SOURCES})
    if custom.function_name() == "auto" and unknown:
        raise RewardError(
            f"no scoring function goes with data_source {', '.join(unknown[:5])} (known: {', '.join(SOURCES)}). Type "
            f"custom_reward_function.name=exact_match to compare with the ground truth, or {own}"
        )
    without = [uid for uid, truth in zip(prompts["uid"], prompts["ground_truth"], strict=True) if truth is None]
    if without:
        raise RewardError(
            f"{len(without)} of {len(prompts)} rows have nothing to compare a response with, first row "
            f"{without[0]}: give the files a struct 'reward_model' with 'ground_truth', or a column 'ground_truth'; or "
            f"type {own}"
        )
