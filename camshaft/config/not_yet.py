"""Keys and values that are accepted by name but not there yet: THE table.

`NOT_YET` refuses a value that asks for a missing feature and says what to type instead; a value that does
not ask for it passes. A feature that arrives takes its lines out of here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from camshaft.config.problems import Problem, grouped
from camshaft.config.schema.fields import Section, is_path
from camshaft.config.tree import get, leaf_fields

Asks = Callable[[Any], bool]


@dataclass(frozen=True)
class NotYet:
    """These keys ask for a missing feature where `asks(value)`; the sentence says what to type instead.

    In it `{key}` is the first of the keys, and `{section}` what that is in.
    """

    keys: tuple[str, ...]
    asks: Asks
    sentence: str


def _is(*values: Any) -> Asks:
    return lambda value: value in values


_NO_PURE_BFLOAT16 = (
    "training in pure bfloat16 loses updates smaller than its rounding: keep float32 weights and compute in bfloat16."
    " Type {key}=float32 {section}.mixed_precision.param_dtype=bfloat16."
)

NOT_YET = (
    NotYet(
        ("actor_rollout_ref.actor.strategy", "critic.strategy", "reward_model.strategy", "strategy"),
        _is("megatron", "torchtitan"),
        "is not there yet. Type {key}=fsdp, or {key}=reference: plain torch, one process.",
    ),
    NotYet(
        (
            "actor_rollout_ref.actor.fsdp_config.model_dtype",
            "critic.model.fsdp_config.model_dtype",
            "fsdp_config.model_dtype",
        ),
        _is("bfloat16"),
        _NO_PURE_BFLOAT16,
    ),
    NotYet(
        ("actor_rollout_ref.hybrid_engine",),
        _is(False),
        "actor and rollout on separate devices are not there yet. Type {key}=true.",
    ),
)

MAY_BE_REMOTE = frozenset(
    {
        "trainer.default_hdfs_dir",
        *("data.train_files", "data.val_files", "data.path", "data.tokenizer"),
        *("model.path", "model.lora_adapter_path"),
        *("actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_adapter_path"),
        *("critic.model.path", "critic.model.lora_adapter_path", "critic.model.tokenizer_path"),
        *("reward_model.model.path", "reward_model.model.input_tokenizer"),
    }
)
"""Keys of files and folders that may be URLs of other file systems: what is read, and what copies go to."""

_NOT_REMOTE = (
    "a remote file system is not there yet for this key: data and models are read from one, and copies go "
    "to one with trainer.default_hdfs_dir. Give a local path."
)


def refusals(tree: Mapping[str, Any], schema: type[Section]) -> Iterator[Problem]:
    """Every value of a valid config that asks for a missing feature; keys that share a cause come as one."""
    known = leaf_fields(schema)
    for entry in NOT_YET:
        keys = [key for key in entry.keys if key in known and entry.asks(get(tree, key))]
        if keys:
            sentence = entry.sentence.format(key=keys[0], section=keys[0].rpartition(".")[0])
            yield grouped(keys, get(tree, keys[0]), sentence)
    yield from _remote_paths(tree, schema)


def _remote_paths(tree: Mapping[str, Any], schema: type[Section]) -> Iterator[Problem]:
    found: dict[str, list[str]] = {}
    for key, field in leaf_fields(schema).items():
        if is_path(field) and key not in MAY_BE_REMOTE:
            value = get(tree, key)
            for path in [value] if isinstance(value, str) else value or ():
                if "://" in path:
                    found.setdefault(path, []).append(key)
    for path, keys in found.items():
        if not any(path.startswith(f"{folder}/") for folder in found):  # the folder is told, and what lies in it not
            yield grouped(keys, path, _NOT_REMOTE)


def later(key: str) -> str | None:
    """What a reader of the documentation should know of a key that is in the table, or None."""
    return "not every value is there yet" if any(key in entry.keys for entry in NOT_YET) else None
