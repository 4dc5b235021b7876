"""Aliases of config keys and values, and deprecated keys. `load.py` renames them before it validates a config."""

import copy
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from camshaft.config.errors import Problem
from camshaft.config.guards import is_list
from camshaft.config.schema.fields import Alias, marks
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import RMConfig, SFTConfig
from camshaft.config.tree import fields, flatten, format_value, get, has_key, leaf_fields, put, remove

logger = logging.getLogger("camshaft.config")


def _declared_aliases() -> Iterator[tuple[str, str]]:
    """Yield the aliases at the fields of all commands, with their keys."""
    for schema in (PPOConfig, SFTConfig, RMConfig, GenerateConfig):
        for key, field in fields(schema).items():
            for alias in marks(field, Alias):
                section, dot, _ = key.rpartition(".")
                yield f"{section}{dot}{alias.name}", key


ALIASES = dict(_declared_aliases()) | {
    "actor_rollout_ref.model.tokenizer_path": "data.tokenizer",
    "actor_rollout_ref.actor.optim.clip_grad": "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.optim.grad_clip": "actor_rollout_ref.actor.grad_clip",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.grad_clip": "critic.grad_clip",
    "reward_model.model.fsdp_config.min_num_params": "reward_model.model.fsdp_config.wrap_policy.min_num_params",
    "reward.custom_reward_function": "custom_reward_function",
    "optim.clip_grad": "grad_clip",
    "optim.grad_clip": "grad_clip",
    "data.n_samples": "rollout.n",
}
"""Maps aliases to config keys. The alias of a section applies to all keys in the section. Those of keys in the same
section stand at the fields."""

REMOVED_IN = "camshaft 1.0"
"""Version that removes the aliases and the deprecated keys."""

_GLOBAL_MICRO_BATCHES = (
    *("actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.ref.log_prob_micro_batch_size"),
    *("actor_rollout_ref.rollout.log_prob_micro_batch_size", "reward_model.micro_batch_size"),
    *("critic.ppo_micro_batch_size", "critic.forward_micro_batch_size"),
)
"""Deprecated micro-batch sizes over all ranks. With the suffix `_per_gpu`, they count the sequences of each rank."""


def _dtype_keys() -> Iterator[str]:
    """Yield the keys of all commands whose value is a dtype."""
    for schema in (PPOConfig, SFTConfig, RMConfig, GenerateConfig):
        yield from (key for key in leaf_fields(schema) if key.rpartition(".")[2].endswith("dtype"))


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
VALUE_ALIASES: dict[str, dict[str, str]] = {
    "trainer.logger": {"file": "jsonl", "tracking": "wandb"},
    **dict.fromkeys(_dtype_keys(), _DTYPES),
}
"""Maps config keys to aliases of their values. For a list, the aliases apply to each item."""


def rename_aliases(
    tree: Mapping[str, Any], defaults: Mapping[str, Any], set_keys: Collection[str], leaves: Collection[str]
) -> tuple[dict[str, Any], list[Problem]]:
    """Replace aliases with config keys, and log a warning for each, and for each deprecated key.

    An alias is a problem if the user also set the config key to a different value. The user set a key if it is in
    `set_keys`, or if its value differs from `defaults`.
    """
    renamed = copy.deepcopy(dict(tree))
    problems: list[Problem] = []
    for alias, key in ALIASES.items():
        if not has_key(renamed, alias) or not any(leaf == key or leaf.startswith(f"{key}.") for leaf in leaves):
            continue
        logger.warning("config: '%s' is a deprecated alias, which %s removes; use '%s'", alias, REMOVED_IN, key)
        for leaf, value in flatten({alias: get(renamed, alias)}, [alias] if key in leaves else leaves).items():
            problems += _move(renamed, leaf, key + leaf.removeprefix(alias), value, defaults, set_keys)
        remove(renamed, alias)
    for key, aliases in VALUE_ALIASES.items():
        if has_key(renamed, key) and key in leaves:
            put(renamed, key, _rename_value(key, get(renamed, key), aliases))
    for key in _GLOBAL_MICRO_BATCHES:
        if _is_set(renamed, key, defaults, set_keys) and get(renamed, key) is not None:
            per_gpu = f"{key}_per_gpu"
            logger.warning("config: '%s' is deprecated, and %s removes it; use '%s'", key, REMOVED_IN, per_gpu)
            if not _is_set(renamed, per_gpu, defaults, set_keys):
                put(renamed, per_gpu, None)
    return renamed, problems


def _is_set(tree: Mapping[str, Any], key: str, defaults: Mapping[str, Any], set_keys: Collection[str]) -> bool:
    """Return True if the user set a key: it is in `set_keys`, or its value differs from `defaults`."""
    if not has_key(tree, key):
        return False
    return key in set_keys or not has_key(defaults, key) or get(tree, key) != get(defaults, key)


def _move(
    tree: dict[str, Any], alias: str, key: str, value: Any, defaults: Mapping[str, Any], set_keys: Collection[str]
) -> list[Problem]:
    if _is_set(tree, key, defaults, set_keys) and get(tree, key) != value:
        message = f"is an alias of {key}, which is set to {format_value(get(tree, key))}. Set only one of the two."
        return [Problem(alias, value, message)]
    put(tree, key, value)
    return []


def _rename_value(key: str, value: Any, aliases: Mapping[str, str]) -> Any:
    if is_list(value):
        return [_rename_value(key, item, aliases) for item in value]
    if not isinstance(value, str) or value not in aliases:
        return value
    logger.warning(
        "config: %s=%s is a deprecated alias, which %s removes; use %s", key, value, REMOVED_IN, aliases[value]
    )
    return aliases[value]
