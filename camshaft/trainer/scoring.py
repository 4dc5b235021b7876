"""Build the scoring of responses from reward function, reward model, environments and overlong penalty.

    rewards = build_rewards(config.custom_reward_function)      # only the reward function
    rewards = build_run_rewards(config)                         # reward function, reward model and overlong penalty
    result = rewards.score(batch, decode)

`check_scorable` checks the data before a run.
"""

from collections.abc import Sequence
from pathlib import Path

from camshaft.config import CustomRewardConfig, PPOConfig
from camshaft.dataproto import DataProto
from camshaft.errors import RewardError
from camshaft.plugins import REWARDS, import_attribute
from camshaft.rewards.auto import check_sources, reward_for
from camshaft.rewards.combined import CombinedRewards, RewardsWrapper
from camshaft.rewards.environments import EnvironmentRewards
from camshaft.rewards.manager import RewardManager
from camshaft.rewards.messages import FunctionSpec
from camshaft.rewards.overlong import OverlongPenalty
from camshaft.stop import Stop


def build_rewards(
    custom: CustomRewardConfig,
    output: Path | None = None,
    stop: Stop | None = None,
    stop_timeout: float = 0.0,
    pickled: Sequence[FunctionSpec] = (),
    has_environments: bool = False,
) -> RewardManager:
    """Load the reward functions in worker processes. The arguments are those of `RewardManager`.

    `pickled` replaces the functions that the config names.
    """
    selected = [FunctionSpec(f.path, f.name, f.kwargs, custom.batched, f.label, f.weight) for f in custom.selected()]
    passed = [function._replace(kwargs=custom.reward_kwargs, batched=custom.batched) for function in pickled]
    return RewardManager(
        functions=passed or selected,
        timeout=custom.timeout,
        num_workers=custom.num_workers,
        max_concurrency=custom.max_concurrency,
        on_error=custom.on_error,
        max_abs_score=custom.max_abs_score,
        load_timeout=custom.load_timeout,
        output=output,
        stop=stop,
        stop_timeout=stop_timeout,
        has_environments=has_environments,
    )


def build_answer_rewards(custom: CustomRewardConfig, has_environments: bool = False) -> RewardManager:
    """Build the scoring of `camshaft generate` and `camshaft eval`, which keep samples that cannot be scored."""
    if custom.on_error == "drop":
        custom = custom.model_copy(update={"on_error": "zero"})
    return build_rewards(custom, has_environments=has_environments)


def build_run_rewards(
    config: PPOConfig, stop: Stop | None = None, pickled: Sequence[FunctionSpec] = ()
) -> RewardManager | RewardsWrapper:
    """Build the scoring of a PPO run from reward function, reward model, environments and overlong penalty.

    Scoring ends if it takes longer than `trainer.stop_timeout` after a request of `stop`. `pickled` replaces the
    reward functions that the config names.
    """
    custom, trainer, model = config.custom_reward_function, config.trainer, config.reward_model
    overlong, limit = model.overlong_buffer, config.actor_rollout_ref.rollout.response_length
    function = None
    if config.needs_function():
        output = Path(trainer.default_local_dir) / "rewards" / "output.log"
        plays = config.plays_episodes()
        function = build_rewards(custom, output, stop, trainer.stop_timeout, pickled, has_environments=plays)
    rewards = CombinedRewards(function, model.weight) if model.enable else function
    if rewards is None or config.plays_episodes():
        rewards = EnvironmentRewards(rewards, raises=custom.on_error == "raise")
    if not overlong.enable:
        return rewards
    return OverlongPenalty(rewards, limit=limit, buffer=overlong.len, factor=overlong.penalty_factor, log=overlong.log)


def check_scorable(prompts: DataProto, custom: CustomRewardConfig, has_reward_model: bool = False) -> None:
    """Raise RewardError if the built-in reward function cannot score these rows. Custom functions are not checked."""
    names = {function.name for function in custom.selected() if function.path is None}
    if not names or not len(prompts):
        return
    alternative = "custom_reward_function.path=my_reward.py for a custom function"
    if has_reward_model:
        alternative += ", or custom_reward_function.name=null to score with the reward model only"
    if "auto" in names:
        sources = {str(source) for source in prompts["data_source"]}
        check_sources(sources, has_reward_model)
        for name in sorted({name for name in map(reward_for, sources) if name is not None}):
            import_attribute(REWARDS[name])  # reports missing optional libraries at startup
    missing_rows = [uid for uid, truth in zip(prompts["uid"], prompts["ground_truth"], strict=True) if truth is None]
    if missing_rows:
        raise RewardError(
            f"{len(missing_rows)} of {len(prompts)} rows have no ground truth; the first is row {missing_rows[0]}. "
            "Add a struct 'reward_model' with 'ground_truth' or a column 'ground_truth' to the files, or use "
            f"{alternative}"
        )
