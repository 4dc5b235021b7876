"""The prompt length of a planned run, which the run takes from its data if it is not set.

config = fit_to_data(config)        # with the longest prompt of the data, if the data is on this machine
"""

from dataclasses import replace
from typing import TypeVar

from camshaft.config import PPOConfig, SupervisedConfig
from camshaft.config.auto.fitting import awaits_prompts, fit_to_prompts
from camshaft.config.auto.rules import MAX_PROMPT_LENGTH, PROMPTS
from camshaft.config.files import dataset_name
from camshaft.config.model_settings import local_model
from camshaft.data import data_files, read_prompts
from camshaft.errors import CamshaftError
from camshaft.models.loader import load_tokenizer
from camshaft.storage import is_url
from camshaft.trainer.build import prompt_files, prompt_options

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)

ASSUMED = "assumed"
"""Reason of a prompt length that was not measured."""
_longest: dict[str, int | None] = {}
"""Lengths of the longest prompts by the settings that they depend on; None if the data cannot be read here."""


def fit_to_data(config: Config) -> Config:
    """Return the config with the prompt length of its data, or with the longest for any data, if none is set."""
    if not isinstance(config, PPOConfig) or not awaits_prompts(config):
        return config
    key = f"{config.tokenizer_path()} {config.data.model_dump_json()}"
    if key not in _longest:
        _longest[key] = _measure(config)
    longest = _longest[key]
    if longest is not None:
        return fit_to_prompts(config, longest)
    fitted = fit_to_prompts(config, MAX_PROMPT_LENGTH)
    choices = [replace(choice, reason=ASSUMED) if choice.key == PROMPTS else choice for choice in fitted.choices()]
    return fitted.with_choices(choices)


def _measure(config: PPOConfig) -> int | None:
    """Return the length of the longest prompt.

    None if data or tokenizer are not on this machine, and if they cannot be read, which the run reports.
    """
    paths = (*config.data.train_files, *config.data.val_files)
    tokenizer = config.data.tokenizer or config.actor_rollout_ref.model.path
    if any(is_url(path) or dataset_name(path) for path in paths) or local_model(tokenizer) is None:
        return None
    longest = 1
    try:
        loaded = load_tokenizer(config.tokenizer_path(), config.data.trust_remote_code, config.data.chat_template)
        for train in (True, False):
            paths, max_rows = prompt_files(config, train)
            if paths:
                prompts = read_prompts(data_files(paths), loaded, prompt_options(config), max_rows)
                longest = max(longest, int(prompts.ids.lengths.max()))
    except CamshaftError:
        return None
    return longest
