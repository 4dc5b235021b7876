"""Checks of scoring functions, of the reward model and of the overlong penalty."""

import re
from collections.abc import Iterator

from camshaft.config.auto.fitting import awaits_prompts
from camshaft.config.errors import Problem, check_name
from camshaft.config.schema.algorithm import estimator_inputs
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.reward import DEFAULT_FUNCTION, CustomRewardConfig
from camshaft.plugins import REWARDS

CUSTOM, REWARD = "custom_reward_function", "reward_model"
ROLLOUT = "actor_rollout_ref.rollout"


def check_scores(config: PPOConfig) -> Iterator[Problem]:
    """Check the scoring functions, the reward model and the overlong penalty of a run."""
    if config.needs_function():
        yield from check_scoring_function(config.custom_reward_function)
        yield from _check_reserved_labels(config)
    yield from _check_overlong_buffer(config)
    reward = config.reward_model
    if not reward.enable:
        return
    if reward.worker_cls is not None:
        yield from check_name(f"{REWARD}.worker_cls", reward.worker_cls, (), "reward_models")
        return
    if reward.max_length or not awaits_prompts(config):
        yield from check_token_budget_of_scores(config)
    if reward.model.input_tokenizer is not None and config.plays_episodes():
        key = f"{REWARD}.model.input_tokenizer"
        message = (
            f"would decode observations as a part of the response. Set {key}=null, so that the reward "
            "model reads the tokens of the episode."
        )
        yield Problem(
            key,
            reward.model.input_tokenizer,
            message,
            (f"{ROLLOUT}.{config.actor_rollout_ref.rollout.multi_turn.player_key()}",),
        )
    if reward.model.input_tokenizer is None and config.data.return_raw_input_ids:
        message = (
            f"has no effect with {REWARD}.model.input_tokenizer=null, because the reward model then reads the policy's "
            f"token IDs. Set data.return_raw_input_ids=false, or {REWARD}.model.input_tokenizer="
            f"{config.data.tokenizer or config.actor_rollout_ref.model.path}."
        )
        yield Problem("data.return_raw_input_ids", True, message, (f"{REWARD}.model.input_tokenizer",))


def _check_reserved_labels(config: PPOConfig) -> Iterator[Problem]:
    """Check that no metric of a function has the name of one of the reward model or the overlong penalty."""
    custom, reward = config.custom_reward_function, config.reward_model
    reserved = (
        *(("function", "model") if reward.enable else ()),
        *(("overlong", "overlong_reward") if reward.overlong_buffer.enable else ()),
    )
    for function in custom.selected():
        if function.label in reserved:
            message = f"contains a function with the name {function.label}, which other metrics use. Rename it."
            yield Problem(f"{CUSTOM}.functions", custom.functions, message)


def _check_overlong_buffer(config: PPOConfig) -> Iterator[Problem]:
    buffer, max_length = config.reward_model.overlong_buffer, config.actor_rollout_ref.rollout.response_length
    if buffer.enable and not 1 <= buffer.len <= max_length:
        key, limit = f"{REWARD}.overlong_buffer.len", f"{ROLLOUT}.response_length"
        message = (
            f"must be between 1 and {limit}={max_length}. Set {key}={max(1, max_length // 4)}, a quarter of the "
            "response length."
        )
        yield Problem(key, buffer.len, message, (limit, f"{REWARD}.overlong_buffer.enable"))
    if buffer.enable and estimator_inputs(config.algorithm.adv_estimator).reward_parts:
        key = f"{REWARD}.overlong_buffer.enable"
        message = f"has no effect with algorithm.adv_estimator=gdpo, which reads single rewards only. Set {key}=false."
        yield Problem(key, True, message, ("algorithm.adv_estimator",))


def check_token_budget_of_scores(config: PPOConfig) -> Iterator[Problem]:
    reward, max_length = config.reward_model, config.max_scored_length()
    key, budget = f"{REWARD}.forward_max_token_len_per_gpu", reward.forward_max_token_len_per_gpu
    if not reward.use_dynamic_bsz or budget >= max_length:
        return
    source = f"{REWARD}.max_length" if reward.max_length else "data.max_prompt_length + rollout.response_length"
    message = f"is smaller than the longest scored sequence: {source} = {max_length}. Set {key}={max_length} or more."
    related = (f"{REWARD}.max_length", "data.max_prompt_length", f"{ROLLOUT}.response_length")
    yield Problem(key, budget, message, related)


def check_scoring_function(custom: CustomRewardConfig) -> Iterator[Problem]:
    """Check the selection of the scoring functions. A function in a file is checked when it is imported."""
    problems = list(_check_function_list(custom))
    yield from problems
    for function in () if problems else custom.selected():
        if function.path is not None:
            continue
        if function.name == "format" and "pattern" in function.kwargs:
            pattern = function.kwargs["pattern"]
            try:
                re.compile(str(pattern))
            except re.error as error:
                message = (
                    f"invalid regular expression: {error}. Put the pattern in single quotes if the shell changes it."
                )
                yield Problem(f"{CUSTOM}.reward_kwargs", {"pattern": pattern}, message)
        key, related = (f"{CUSTOM}.functions", ()) if custom.functions else (f"{CUSTOM}.name", (f"{CUSTOM}.path",))
        yield from check_name(key, function.name, REWARDS, "rewards", "module:function", related)


def _check_function_list(custom: CustomRewardConfig) -> Iterator[Problem]:
    """Check the keys that refer to several functions."""
    functions, weights = custom.functions, custom.weights
    key, weights_key = f"{CUSTOM}.functions", f"{CUSTOM}.weights"
    if not functions:
        if weights:
            yield Problem(
                weights_key, weights, f"requires {key}. Set it to one function per weight, or omit the key.", (key,)
            )
        return
    if weights and len(weights) != len(functions):
        message = f"has {len(weights)} numbers for {len(functions)} functions. Set one weight for each of {key}."
        yield Problem(weights_key, weights, message, (key,))
    others = {"path": custom.path, "batched": custom.batched, "name": custom.name}
    for name, value in others.items():
        if value is not None and (name, value) != ("name", DEFAULT_FUNCTION):
            yield Problem(f"{CUSTOM}.{name}", value, f"applies to a single function. Omit it, or {key}.", (key,))
    labels = [function.label for function in custom.selected()]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        message = f"selects two functions with the name {label}. Remove one of them, or set file.py:function."
        yield Problem(key, functions, message)
    for label, kwargs in custom.reward_kwargs.items():
        if label not in labels or not isinstance(kwargs, dict):
            form = f"{CUSTOM}.reward_kwargs.{labels[0]}.<argument>=<value>"
            if "." in labels[0]:
                form = f"'{CUSTOM}.reward_kwargs={{{labels[0]}: {{<argument>: <value>}}}}'"
            message = f"must be the arguments of a function: {', '.join(labels)}. Set, for example, {form}."
            yield Problem(f"{CUSTOM}.reward_kwargs.{label}", kwargs, message, (key,))
