"""What the keys of scores must fulfil: scoring functions, and the reward model beside them. Used by `checks.py`.

    problems = [*scores(config)]

How the model is shared out is in `sharding.py`, what is on disk in `files.py`. Of a worker of the user's own nothing is
known but its name.
"""

import re
from collections.abc import Iterator

from camshaft.config.problems import Problem, check_name
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.reward import CustomRewardConfig
from camshaft.plugins import REWARDS

MODEL = "reward_model"


def scores(config: PPOConfig) -> Iterator[Problem]:
    """Everything that is wrong with how an RL run scores."""
    if config.needs_function():
        yield from scoring_function(config.custom_reward_function)
    yield from _overlong_buffer(config)
    reward = config.reward_model
    if not reward.enable:
        return
    if reward.worker_cls is not None:
        yield from check_name(f"{MODEL}.worker_cls", reward.worker_cls, (), "reward_models")
        return
    yield from _token_budget(config)
    if reward.model.input_tokenizer is None and config.data.return_raw_input_ids:
        sentence = (
            f"is not read with {MODEL}.model.input_tokenizer=null: the model gets the policy's token ids. Type "
            f"data.return_raw_input_ids=false, or {MODEL}.model.input_tokenizer={config.tokenizer_path()}."
        )
        yield Problem("data.return_raw_input_ids", True, sentence, (f"{MODEL}.model.input_tokenizer",))


def scoring_function(custom: CustomRewardConfig) -> Iterator[Problem]:
    """With a path the name is a function there, and that is found out where it is loaded."""
    if custom.path is None:
        if custom.function_name() == "format" and "pattern" in custom.reward_kwargs:
            yield from _pattern(custom.reward_kwargs["pattern"])
        key, rests_on = "custom_reward_function.name", ("custom_reward_function.path",)
        yield from check_name(key, custom.function_name(), REWARDS, "rewards", "module:function", rests_on)


def _overlong_buffer(config: PPOConfig) -> Iterator[Problem]:
    """The penalty grows over some tokens, and a response has so many."""
    buffer, longest = config.reward_model.overlong_buffer, config.actor_rollout_ref.rollout.response_length
    if buffer.enable and not 1 <= buffer.len <= longest:
        key, limit = f"{MODEL}.overlong_buffer.len", "actor_rollout_ref.rollout.response_length"
        sentence = f"must be 1 .. {longest}, which is {limit}. Type {key}={max(1, longest // 4)}, a quarter of it."
        yield Problem(key, buffer.len, sentence, (limit, f"{MODEL}.overlong_buffer.enable"))


def _pattern(pattern: object) -> Iterator[Problem]:
    """What a response of the right form looks like."""
    try:
        re.compile(str(pattern))
    except re.error as error:
        sentence = f"is no regular expression of Python: {error}. Quote it as '...' where the shell would change it."
        yield Problem("custom_reward_function.reward_kwargs", {"pattern": pattern}, sentence)


def _token_budget(config: PPOConfig) -> Iterator[Problem]:
    """A budget is a hard limit, so the longest sequence must fit into it."""
    reward, longest = config.reward_model, config.longest_scored()
    key, budget = f"{MODEL}.forward_max_token_len_per_gpu", reward.forward_max_token_len_per_gpu
    if not reward.use_dynamic_bsz or budget >= longest:
        return
    whose = f"{MODEL}.max_length" if reward.max_length else "data.max_prompt_length + rollout.response_length"
    sentence = f"is less than the longest sequence that is scored: {whose} = {longest}. Type {key}={longest} or more."
    rests_on = (f"{MODEL}.max_length", "data.max_prompt_length", "actor_rollout_ref.rollout.response_length")
    yield Problem(key, budget, sentence, rests_on)
