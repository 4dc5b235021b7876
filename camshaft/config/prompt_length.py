"""The maximum prompt length of a run that does not set it, from its data.

    fitted = fit_to_prompts(config, 87)         # if no prompt is longer than 87 tokens

`auto.py` chooses the largest length for any data before.
"""

from typing import TypeVar

from camshaft.config.auto import (
    PROMPTS,
    ROLLOUT_PROMPTS,
    Settings,
    longest_response,
    longest_scored,
    with_values,
)
from camshaft.config.schema.fields import Choice
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import SUPERVISED_UPDATES
from camshaft.config.tree import get, put
from camshaft.machine import Machine

OTHER_TEMPLATE_LENGTH = 512
"""Least prompt length that is chosen if a reward model formats the prompts with another template."""

PromptsConfig = TypeVar("PromptsConfig", PPOConfig, GenerateConfig)


def fit_to_prompts(config: PromptsConfig, longest: int, previous: int = 0) -> PromptsConfig:
    """Return the config with the length of the longest prompt as maximum, if no maximum is set.

    Limits of micro-batches that were chosen are raised if its rows need more tokens. A run that resumes keeps the
    `previous` maximum, unless a prompt is longer.
    """
    keys, least = ["rollout.prompt_length"], max(longest, previous)
    if isinstance(config, PPOConfig):
        keys = [PROMPTS, *([ROLLOUT_PROMPTS] if config.is_automatic(ROLLOUT_PROMPTS) else [])]
        if config.needs_raw_chat():
            least = max(least, OTHER_TEMPLATE_LENGTH)
    if not config.is_automatic(keys[0]):
        return config
    values = config.model_dump()
    length = min(least, get(values, keys[0]))
    changes = dict.fromkeys(keys, length)
    for key in keys:
        put(values, key, length)
    for choice in config.choices():
        if choice.key.endswith(SUPERVISED_UPDATES.tokens):
            row = longest_scored if choice.key.startswith("reward_model.") else longest_response
            changes[choice.key] = max(choice.value, row(Settings(values, Machine())))
    reason = "as before" if length == previous else "for the template of the reward model"
    reasons = {keys[0]: "the longest prompt of the data" if length == longest else reason}
    choices = [
        Choice(choice.key, changes.get(choice.key, choice.value), reasons.get(choice.key, choice.reason))
        for choice in config.choices()
    ]
    return with_values(config, changes).with_choices(choices)
