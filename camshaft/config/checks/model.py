"""Checks of lengths and tokenizers against the config.json of the models, and notices about models and stop strings.

    problems = [*check_ppo_models(config)]         # or check_supervised_models, check_generate_models
    notices = [*find_model_notices(config)]

A model that is not on this machine yet is not checked.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from camshaft.config.derive import shares_prompts
from camshaft.config.errors import Problem
from camshaft.config.families.known import complete_values
from camshaft.config.families.support import unsupported
from camshaft.config.guards import is_list, is_mapping
from camshaft.config.model_settings import (
    ModelSettings,
    is_dropout,
    quantization,
    quantization_problem,
    read_json,
    read_settings,
    read_tokenizer,
)
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.model import AnyModelConfig, LoadedModel, ResponsesModelConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.roles import ActorConfig, CriticConfig, GeneratorConfig, RolloutConfig
from camshaft.config.schema.supervised import SupervisedConfig

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


def check_ppo_models(config: PPOConfig) -> Iterator[Problem]:
    """Check the lengths of an RL run against its models, and the vocabulary of the tokenizer."""
    prompt, response = config.data.max_prompt_length, config.actor_rollout_ref.rollout.response_length
    lengths = {"data.max_prompt_length": prompt, f"{ROLLOUT}.response_length": response}
    model = config.actor_rollout_ref.model
    settings = read_settings(model.path, model.override_config)
    yield from _check_quantization(MODEL, model.path, settings)
    yield from _check_positions(MODEL, model.path, settings, lengths)
    yield from _check_cache(config.actor_rollout_ref.rollout, config.trainer.device, settings, lengths)
    yield from _check_vocabulary(config.tokenizer_path(), "data.tokenizer", f"{MODEL}.path", settings)
    if config.needs_critic() and config.critic.model.path != model.path:
        critic = config.critic.model
        critic_settings = read_settings(critic.path, critic.override_config)
        yield from _check_quantization("critic.model", critic.path, critic_settings)
        yield from _check_positions("critic.model", critic.path, critic_settings, lengths)
        yield from _check_vocabulary(config.tokenizer_path(), "data.tokenizer", "critic.model.path", critic_settings)
    if config.needs_reward_engine():
        reward = config.reward_model
        limit = {"reward_model.max_length": reward.max_length} if reward.max_length else lengths
        reward_settings = read_settings(reward.model.path, reward.model.override_config)
        yield from _check_quantization("reward_model.model", reward.model.path, reward_settings)
        yield from _check_positions("reward_model.model", reward.model.path, reward_settings, limit)


def check_supervised_models(config: SupervisedConfig) -> Iterator[Problem]:
    """Check the length of a sequence, and the vocabulary of the tokenizer. A pair consists of two sequences."""
    settings = read_settings(config.model.path, config.model.override_config)
    yield from _check_quantization("model", config.model.path, settings)
    yield from _check_positions("model", config.model.path, settings, {"data.max_length": config.data.max_length})
    yield from _check_vocabulary(config.model.path, "model.path", "model.path", settings)


def check_generate_models(config: GenerateConfig) -> Iterator[Problem]:
    """Check the lengths of `camshaft generate`, and the vocabulary of the tokenizer."""
    rollout = config.rollout
    lengths = {"rollout.prompt_length": rollout.prompt_length, "rollout.response_length": rollout.response_length}
    settings = read_settings(config.model.path, config.model.override_config)
    yield from _check_positions("model", config.model.path, settings, lengths)
    yield from _check_cache(rollout, config.trainer.device, settings, lengths)
    yield from _check_vocabulary(config.tokenizer_path(), "data.tokenizer", "model.path", settings)


def _check_quantization(section: str, path: str, settings: ModelSettings | None) -> Iterator[Problem]:
    """Report quantized weights, which no engine trains."""
    method = None if settings is None else quantization(settings.values)
    if method is not None:
        yield Problem(f"{section}.path", path, quantization_problem(method))


def _check_positions(
    section: str, path: str, settings: ModelSettings | None, lengths: Mapping[str, int]
) -> Iterator[Problem]:
    """Report sequences that are longer than the model."""
    positions = None if settings is None else settings.positions()
    total = sum(lengths.values())
    if settings is None or positions is None or total <= positions[1]:
        return
    key, limit = positions
    terms = " + ".join(f"{name}={value}" for name, value in lengths.items())
    terms = f"{terms} = {total} tokens" if len(lengths) > 1 else f"{terms} tokens"
    fix = f"Set {' and '.join(lengths)} to at most {limit} tokens{' in total' if len(lengths) > 1 else ''}"
    if not settings.has_learned_positions():
        fix += f", or scale the rotary embedding with rope_scaling in {section}.override_config"
    message = f"the model has {key}={limit} positions, but a sequence can have up to {terms}. {fix}."
    yield Problem(f"{section}.path", path, message, tuple(lengths))


def _check_cache(
    rollout: GeneratorConfig, device: str, settings: ModelSettings | None, lengths: Mapping[str, int]
) -> Iterator[Problem]:
    """Report lengths at which the KV cache of a single sequence exceeds the memory of this machine."""
    size = None if settings is None else settings.cache_bytes(sum(lengths.values()), DTYPE_BYTES[rollout.dtype])
    if size is None or device.partition(":")[0] != "cpu" or size <= machine_memory():
        return
    key = list(lengths)[-1]
    terms = " + ".join(f"{name}={value}" for name, value in lengths.items())
    message = (
        f"the KV cache of one sequence of {terms} tokens takes {size / 2**30:,.0f} GiB, but this machine has "
        f"{machine_memory() / 2**30:,.0f} GiB of memory. Set a smaller length."
    )
    yield Problem(key, lengths[key], message, tuple(lengths))


def machine_memory() -> int:
    """Return the size of the main memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# -- tokenizers -----------------------------------------------------------------------------------


def _check_vocabulary(
    tokenizer: str, tokenizer_key: str, model_key: str, settings: ModelSettings | None
) -> Iterator[Problem]:
    """Report a tokenizer whose regular tokens exceed the embedding of the model."""
    size, entries = None if settings is None else settings.vocabulary_size(), read_tokenizer(tokenizer)
    if size is None or entries is None:
        return
    largest = entries.largest_id()
    if largest >= size:
        message = (
            f"the tokenizer has token IDs up to {largest}, but the embedding of {model_key} has vocab_size={size} "
            "rows. Set the tokenizer of this model."
        )
        yield Problem(tokenizer_key, tokenizer, message, (model_key,))


# -- notices --------------------------------------------------------------------------------------


def find_model_notices(config: PPOConfig | SupervisedConfig | GenerateConfig | EvalConfig) -> Iterator[str]:
    """Yield notices about dropout, prefix sharing, missing end-of-sequence tokens, lengths and stop strings."""
    if isinstance(config, PPOConfig):
        section = config.actor_rollout_ref
        yield from _dropout_notice(MODEL, section.model)
        if config.needs_critic():
            yield from _dropout_notice("critic.model", config.critic.model)
        yield from _prefix_notices(config)
        yield from _prompt_length_notice(config)
        yield from _eos_notice(MODEL, section.model, section.rollout)
        yield from _newline_notice(section.rollout, ROLLOUT)
    elif isinstance(config, SupervisedConfig):
        yield from _dropout_notice("model", config.model)
    elif isinstance(config, GenerateConfig):
        yield from _eos_notice("model", config.model, config.rollout)
        yield from _newline_notice(config.rollout, "rollout")


def _dropout_notice(section: str, model: AnyModelConfig) -> Iterator[str]:
    settings = read_settings(model.path, model.override_config)
    dropout = {} if settings is None else settings.dropout()
    if dropout:
        values = ", ".join(f"{key}={value:g}" for key, value in dropout.items())
        fix = " ".join(f"{section}.override_config.{key}=0.0" for key in dropout)
        yield f"{section}.path={model.path}: training uses dropout ({values}); to train without dropout, set {fix}"


def _prefix_notices(config: PPOConfig) -> Iterator[str]:
    """Report models whose family prevents that a prompt is computed once for all of its responses."""
    roles = config.actor_rollout_ref
    sections: dict[str, tuple[ActorConfig | CriticConfig, ResponsesModelConfig]] = {MODEL: (roles.actor, roles.model)}
    if config.needs_critic():
        sections["critic.model"] = (config.critic, config.critic.model)
    for section, (role, model) in sections.items():
        settings = read_settings(model.path, model.override_config)
        wanted = roles.rollout.n > 1 and model.use_prefix_grouper and shares_prompts(config, role)
        given: Mapping[str, Any] = complete_values(settings.values) if settings is not None and wanted else {}
        values = {key: value for key, value in given.items() if not is_dropout(key)}  # which has its own notice
        if reasons := unsupported("prefix sharing", values):
            yield (
                f"{section}.path={model.path}: prefix sharing is off, because {values.get('model_type')} models with "
                f"this config have {' and '.join(reasons)}. An update computes a prompt once for each of its "
                f"{roles.rollout.n} responses; set {section}.use_prefix_grouper=false to omit this notice"
            )


def _prompt_length_notice(config: PPOConfig) -> Iterator[str]:
    """Report a limit of the generator that no prompt reaches. A smaller limit is an error."""
    length, limit = config.actor_rollout_ref.rollout.prompt_length, config.data.max_prompt_length
    if length > limit:
        yield (
            f"{ROLLOUT}.prompt_length={length} does not allow prompts of more than data.max_prompt_length={limit} "
            f"tokens; set data.max_prompt_length={length}, or omit the key"
        )


def _eos_notice(section: str, model: AnyModelConfig | LoadedModel, rollout: GeneratorConfig) -> Iterator[str]:
    """Report a model without an end-of-sequence token in its vocabulary: its responses always reach the limit."""
    settings = read_settings(model.path, model.override_config)
    if settings is None or rollout.ignore_eos or "model_type" not in settings.values:
        return
    generation = read_json(model.path, "generation_config.json") or {}
    ids = _as_list(settings.values.get("eos_token_id")) + _as_list(generation.get("eos_token_id"))
    ids += _tokenizer_eos(model.path)
    size = settings.vocabulary_size()
    usable = [index for index in ids if size is None or 0 <= index < size]
    if usable or rollout.stop or rollout.stop_token_ids:
        return
    problem = f"its end-of-sequence token {ids} is outside the vocabulary of {size} tokens" if ids else (
        "it has no end-of-sequence token (eos_token_id)"
    )  # fmt: skip
    key = f"{section.removesuffix('model')}rollout.stop_token_ids"
    yield f"{section}.path={model.path}: {problem}, so every response has the maximum length; set {key}=[ID]"


def _newline_notice(rollout: GeneratorConfig, section: str) -> Iterator[str]:
    """Report a stop string with a backslash and the letter n, because overrides have no escape sequences."""
    stops = {f"{section}.stop": rollout.stop}
    if isinstance(rollout, RolloutConfig) and rollout.val_kwargs.stop != rollout.stop:
        stops[f"{section}.val_kwargs.stop"] = rollout.val_kwargs.stop
    for key, strings in stops.items():
        text = next((text for text in strings if re.search(r"\\n(?![a-z])", text)), None)
        if text is not None:
            yield (
                rf"{key} contains '{text}', where \n is a backslash and a letter; for a newline, write "
                rf"""$'{key}=["\n"]' on the command line (bash, zsh), or ["\n"] with double quotes in YAML and Python"""
            )


def _as_list(value: Any) -> list[int]:
    return [index for index in (value if is_list(value) else [value]) if isinstance(index, int)]


def _tokenizer_eos(path: str) -> list[int]:
    """Return the ID of the tokenizer's end-of-sequence token."""
    named = (read_json(path, "tokenizer_config.json") or {}).get("eos_token")
    text = named.get("content") if is_mapping(named) else named
    entries = read_tokenizer(path)
    return [] if entries is None else _as_list(entries.token_id(text))
