"""Older names of keys and values: THE table, and the one place that reads it.

An older name works in files and on the command line, is told once per load, and means exactly what the
new one means. Setting both differently is an error.
"""

import copy
import logging
from collections.abc import Collection, Mapping
from typing import Any

from camshaft.config.problems import Problem
from camshaft.config.tree import flatten, get, has, put, remove, shown

logger = logging.getLogger("camshaft.config")

KEYS = {
    "actor_rollout_ref.model.external_libs": "actor_rollout_ref.model.external_lib",
    "actor_rollout_ref.model.tokenizer_path": "data.tokenizer",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.clip_grad": "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.optim.grad_clip": "actor_rollout_ref.actor.grad_clip",
    "critic.model.external_libs": "critic.model.external_lib",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.grad_clip": "critic.grad_clip",
    "reward_model.model.external_libs": "reward_model.model.external_lib",
    "reward_model.model.fsdp_config.min_num_params": "reward_model.model.fsdp_config.wrap_policy.min_num_params",
    "reward.custom_reward_function": "custom_reward_function",
    "algorithm.gemma": "algorithm.gamma",
    "model.external_libs": "model.external_lib",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "optim.clip_grad": "grad_clip",
    "optim.grad_clip": "grad_clip",
    "data.n_samples": "rollout.n",
}
"""Older key -> key; a section stands for all that is in it."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
VALUES: dict[str, dict[str, str]] = {
    "trainer.logger": {"file": "jsonl", "tracking": "wandb"},
    "actor_rollout_ref.actor.fsdp_config.model_dtype": _DTYPES,
    "actor_rollout_ref.ref.fsdp_config.model_dtype": _DTYPES,
    "actor_rollout_ref.rollout.dtype": _DTYPES,
    "rollout.dtype": _DTYPES,
    "critic.model.fsdp_config.model_dtype": _DTYPES,
    "reward_model.model.fsdp_config.model_dtype": _DTYPES,
    "fsdp_config.model_dtype": _DTYPES,
}
"""Key -> older value -> value; in a list, of its entries."""


def rename(
    tree: Mapping[str, Any], defaults: Mapping[str, Any], set_keys: Collection[str], leaves: Collection[str]
) -> tuple[dict[str, Any], list[Problem]]:
    """`tree` in today's names, with a warning for each older one; and where an older name contradicts today's.

    `set_keys` are the keys that somebody set by hand; of all others, what equals `defaults` counts as unset.
    """
    renamed = copy.deepcopy(dict(tree))
    problems: list[Problem] = []
    for older, key in KEYS.items():
        if not has(renamed, older) or not any(leaf == key or leaf.startswith(f"{key}.") for leaf in leaves):
            continue
        logger.warning("config: '%s' is the older name of '%s'; please use that", older, key)
        for leaf, value in flatten({older: get(renamed, older)}, [older] if key in leaves else leaves).items():
            problems += _move(renamed, leaf, key + leaf.removeprefix(older), value, defaults, set_keys)
        remove(renamed, older)
    for key, words in VALUES.items():
        if has(renamed, key) and key in leaves:
            put(renamed, key, _newer(key, get(renamed, key), words))
    return renamed, problems


def _move(
    tree: dict[str, Any], older: str, key: str, value: Any, defaults: Mapping[str, Any], set_keys: Collection[str]
) -> list[Problem]:
    if has(tree, key) and get(tree, key) != value:
        by_hand = key in set_keys or not has(defaults, key) or get(tree, key) != get(defaults, key)
        if by_hand:
            sentence = f"is the older name of {key}, which is set to {shown(get(tree, key))}. Keep one of the two."
            return [Problem(older, value, sentence)]
    put(tree, key, value)
    return []


def _newer(key: str, value: Any, words: Mapping[str, str]) -> Any:
    if isinstance(value, list | tuple):
        return [_newer(key, entry, words) for entry in value]
    if not isinstance(value, str) or value not in words:
        return value
    logger.warning("config: %s=%s is the older word for %s; please use that", key, value, words[value])
    return words[value]


def older_names(key: str) -> list[str]:
    """Older names of a key, for `camshaft config explain`."""
    return [older for older, newer in KEYS.items() if newer == key]
