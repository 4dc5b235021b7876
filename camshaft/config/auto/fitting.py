"""Fits values that were chosen automatically to the data and to the memory of accelerators."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from camshaft.config.auto.rules import (
    BATCH,
    MINI_BATCH,
    PROMPTS,
    RULES,
    Settings,
    longest_response,
    longest_scored,
)
from camshaft.config.layout import Topology
from camshaft.config.schema.engine import UPDATES
from camshaft.config.schema.fields import Section
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import SUPERVISED_UPDATES, SupervisedConfig
from camshaft.config.tree import get, put
from camshaft.machine import Machine

OTHER_TEMPLATE_LENGTH = 512
"""Least prompt length that is chosen if a reward model formats the prompts with another template."""

RESET_LENGTH = 256
"""Number of tokens that `reset` of an environment may add to a prompt if no prompt length is set."""

TrainingConfig = TypeVar("TrainingConfig", bound=PPOConfig | SupervisedConfig)
PromptsConfig = TypeVar("PromptsConfig", PPOConfig, GenerateConfig)


# -- the size of the data -------------------------------------------------------------------------


def fit_to_rows(config: TrainingConfig, rows: int) -> TrainingConfig:
    """Return the config with a smaller batch, if the batch size was chosen and exceeds the number of training rows.

    The result is the unchanged config if no smaller batch fits the ranks and the mini-batches; the data loader then
    reports the problem.
    """
    size = config.data.train_batch_size
    if not config.is_automatic(BATCH) or rows >= size:
        return config
    candidates = (_with_batch(config, smaller) for smaller in range(rows, 0, -1))
    fitted = next((candidate for candidate in candidates if _is_divisible(candidate)), config)
    reasons = {BATCH: f"the data has {rows} rows", MINI_BATCH: f"as {BATCH}"}
    return fitted.with_choices(
        [
            replace(choice, value=fitted.data.train_batch_size, reason=reasons[choice.key])
            if choice.key in reasons
            else choice
            for choice in config.choices()
        ]
    )


def _with_batch(config: TrainingConfig, size: int) -> TrainingConfig:
    """Return the config with another batch size. A mini-batch that was chosen remains the entire batch."""
    values = {BATCH: size}
    if isinstance(config, PPOConfig) and config.is_automatic(MINI_BATCH):
        values[MINI_BATCH] = size
        if config.critic.ppo_mini_batch_size == config.data.train_batch_size:
            values["critic.ppo_mini_batch_size"] = size
    return with_values(config, values)


def _is_divisible(config: PPOConfig | SupervisedConfig) -> bool:
    """Return True if a batch consists of whole mini-batches, with the same number of sequences for every rank."""
    size = config.data.train_batch_size
    if isinstance(config, SupervisedConfig):
        return size % Topology(config.trainer.world_size).dp_size(config.ranks_per_row()) == 0
    topology, n = config.topology(), config.actor_rollout_ref.rollout.n
    roles = [(config.actor_rollout_ref.actor.ppo_mini_batch_size, config.actor_dp_size(topology))]
    if config.needs_critic():
        roles.append((config.critic.ppo_mini_batch_size, config.critic_dp_size(topology)))
    if config.kl_plan().is_used:
        roles.append((size, config.ref_dp_size(topology)))
    return all(size % mini == 0 and mini * n % dp_size == 0 for mini, dp_size in roles)


# -- the longest prompt ---------------------------------------------------------------------------


def awaits_prompts(config: PPOConfig | SupervisedConfig) -> bool:
    """Return True if the maximum prompt length is still the largest for any data."""
    return any(choice.key == PROMPTS and choice.awaits_data for choice in config.choices())


def fit_to_prompts(config: PromptsConfig, longest: int, previous: int = 0) -> PromptsConfig:
    """Return the config with the length of the longest prompt as maximum, if no maximum is set.

    Limits of micro-batches that were chosen are raised if its rows need more tokens. A run that resumes keeps the
    `previous` maximum, unless a prompt is longer.
    """
    largest = {choice.key: choice.value for choice in config.choices() if choice.awaits_data}
    if not largest:
        return config
    has_other_template = isinstance(config, PPOConfig) and config.needs_raw_chat()
    added = RESET_LENGTH if config.plays_episodes() else 0
    length = max(longest + added, previous, OTHER_TEMPLATE_LENGTH if has_other_template else 1)
    length = min(length, *largest.values())
    values, changes = config.model_dump(), dict.fromkeys(largest, length)
    for key in largest:
        put(values, key, length)
    for choice in config.choices():
        if choice.key.endswith(SUPERVISED_UPDATES.tokens):
            row = longest_scored if choice.key.startswith("reward_model.") else longest_response
            changes[choice.key] = max(choice.value, row(Settings(values, Machine())))
    reason = "as before" if length == previous else "for the template of the reward model"
    if length == longest + added:
        reason = "the longest prompt of the data" + (f", and {added} tokens of the environment" if added else "")
    shown = next(iter(largest))
    choices = [
        replace(
            choice,
            value=changes.get(choice.key, choice.value),
            reason=reason if choice.key == shown else choice.reason,
            awaits_data=False,
        )
        for choice in config.choices()
    ]
    return with_values(config, changes).with_choices(choices)


# -- the memory of accelerators -------------------------------------------------------------------


def token_limits(config: PPOConfig | SupervisedConfig, halvings: int) -> dict[str, int]:
    """Return the tokens of the micro-batches on an accelerator, as far as they were chosen, after some halvings."""
    values, limits = config.model_dump(), dict[str, int]()
    for key in (choice.key for choice in config.choices() if choice.key.endswith(SUPERVISED_UPDATES.tokens)):
        if has_role(config, key) and get(values, key.rpartition(".")[0]).get(UPDATES.dynamic, True):
            limits[key], _ = RULES[type(config)][key](Settings(values, Machine(), halvings))
            put(values, key, limits[key])
    return limits


def with_tokens(config: TrainingConfig, limits: Mapping[str, int], reason: str) -> TrainingConfig:
    """Return the config with other tokens of its micro-batches, and the reason for the numbers that are printed."""
    choices = [
        replace(choice, value=limits[choice.key], reason=choice.reason and f"tokens per micro-batch, {reason}")
        if choice.key in limits
        else choice
        for choice in config.choices()
    ]
    return with_values(config, limits).with_choices(choices)


_AnySection = TypeVar("_AnySection", bound=Section)


def with_values(section: _AnySection, values: Mapping[str, Any]) -> _AnySection:
    """Return a copy of a section with other values of dotted keys."""
    update: dict[str, Any] = {}
    for name in {key.partition(".")[0] for key in values}:
        inner = {key.partition(".")[2]: value for key, value in values.items() if key.partition(".")[0] == name}
        update[name] = inner[""] if "" in inner else with_values(dict(section)[name], inner)
    return section.model_copy(update=update)


def has_role(config: PPOConfig | SupervisedConfig | GenerateConfig, key: str) -> bool:
    """Return False if the key belongs to a role that the run does not have."""
    section = key.partition(".")[0]
    if isinstance(config, PPOConfig) and section == "critic":
        return config.needs_critic()
    return not isinstance(config, PPOConfig) or section != "reward_model" or config.reward_model.enable
