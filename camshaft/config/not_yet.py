"""Keys and values that are accepted by name but not there yet: THE table.

`NOT_YET` refuses a value that asks for a missing feature and says what to type instead; a value that does
not ask for it passes. `READ_LATER` lists keys whose every value passes because only a missing feature
reads them, and says which. A feature that arrives takes its lines out of here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from camshaft.config.fields import Section, is_path
from camshaft.config.problems import Problem
from camshaft.config.tree import get, leaf_fields

Asks = Callable[[Any], bool]


@dataclass(frozen=True)
class NotYet:
    """These keys ask for a missing feature where `asks(value)`; the sentence says what to type instead."""

    keys: tuple[str, ...]
    asks: Asks
    sentence: str


def _is(*values: Any) -> Asks:
    return lambda value: value in values


def _is_set(value: Any) -> bool:
    return value is not None


def _is_true(value: Any) -> bool:
    return value is True


def _above(limit: int) -> Asks:
    return lambda value: value > limit


_FSDP = (
    "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.ref.fsdp_config",
    "critic.model.fsdp_config",
    "fsdp_config",
)
ROLLOUT_DEVICES = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_OFFLOADS = tuple(f"{section}.{part}_offload" for section in _FSDP for part in ("param", "grad", "optimizer"))
_NO_MASTER_WEIGHTS = (
    "float32 master weights are not there yet, and training in pure bfloat16 loses updates smaller than its rounding."
)

NOT_YET = (
    NotYet(
        ("actor_rollout_ref.actor.strategy", "critic.strategy", "strategy"),
        _is("fsdp", "fsdp1", "fsdp2", "megatron", "torchtitan"),
        "is not there yet. Type {key}=reference: plain torch, one process.",
    ),
    NotYet(
        ("actor_rollout_ref.rollout.name",),
        _is("vllm", "sglang"),
        "is not there yet. Type {key}=torch (built in), or hf (transformers.generate).",
    ),
    NotYet(
        ("trainer.nnodes", "trainer.n_gpus_per_node"),
        _above(1),
        "more than one training process is not there yet. Type {key}=1.",
    ),
    NotYet(
        (ROLLOUT_DEVICES,),
        lambda value: value not in (1, 2),
        "a generator on several devices is not there yet. Type {key}=1. (The default, 2, is read by vllm alone.)",
    ),
    NotYet(
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", "critic.model.fsdp_config.model_dtype"),
        _is("bfloat16"),
        f"{_NO_MASTER_WEIGHTS} Type {{key}}=float32. (The reference and the rollout may be bfloat16.)",
    ),
    NotYet(("fsdp_config.model_dtype",), _is("bfloat16"), f"{_NO_MASTER_WEIGHTS} Type {{key}}=float32."),
    NotYet(_OFFLOADS, _is_true, "offloading is not there yet. Type {key}=false."),
    NotYet(
        tuple(f"{section}.wrap_policy.transformer_layer_cls_to_wrap" for section in _FSDP),
        _is_set,
        "sharding is not there yet. Type {key}=null.",
    ),
    NotYet(
        tuple(f"{section}.wrap_policy.min_num_params" for section in _FSDP),
        _above(0),
        "sharding is not there yet. Type {key}=0.",
    ),
    NotYet(
        ("reward_model.enable",),
        _is_true,
        "reward models are not there yet. Type {key}=false and score with custom_reward_function.",
    ),
    NotYet(
        ("data.return_raw_input_ids", "data.return_raw_chat"),
        _is_true,
        "only a reward model reads this, and reward models are not there yet. Type {key}=false.",
    ),
    NotYet(
        ("data.prompt_id_key", "data.max_prompt_id_length"),
        _is_set,
        "prompt ids are not there yet. Type {key}=null.",
    ),
    NotYet(
        ("algorithm.adv_estimator",),
        _is("remax"),
        "is not there yet (it compares with a greedy response). Type {key}=rloo for a baseline without a critic.",
    ),
    NotYet(
        ("algorithm.kl_penalty", "actor_rollout_ref.actor.kl_loss_type"),
        _is("full"),
        "the KL divergence over the whole vocabulary is not there yet. Type {key}=low_var_kl.",
    ),
    NotYet(
        ("actor_rollout_ref.actor.policy_loss.loss_mode",),
        lambda value: value != "vanilla",
        "vanilla (clipped PPO) is the only policy loss. Type {key}=vanilla.",
    ),
    NotYet(
        ("actor_rollout_ref.hybrid_engine",),
        _is(False),
        "actor and rollout on separate devices are not there yet. Type {key}=true.",
    ),
    NotYet(
        ("trainer.logger",),
        lambda value: bool({"wandb", "tracking", "tensorboard"} & set(value)),
        "wandb, tracking and tensorboard are not there yet. Type '{key}=[console,jsonl]'.",
    ),
)

_VLLM = "the vllm rollout"
_REWARD_MODEL = "the reward model"
READ_LATER = {
    "actor_rollout_ref.rollout.gpu_memory_utilization": _VLLM,
    "actor_rollout_ref.rollout.enforce_eager": _VLLM,
    "actor_rollout_ref.rollout.load_format": _VLLM,
    "reward_model.model.input_tokenizer": _REWARD_MODEL,
    "reward_model.model.path": _REWARD_MODEL,
    "reward_model.model.external_lib": _REWARD_MODEL,
    "reward_model.model.fsdp_config.min_num_params": _REWARD_MODEL,
    "reward_model.model.fsdp_config.param_offload": _REWARD_MODEL,
    "reward_model.micro_batch_size": _REWARD_MODEL,
    "reward_model.max_length": _REWARD_MODEL,
}
"""Key -> the missing feature that will read it."""


def refusals(tree: Mapping[str, Any], schema: type[Section]) -> Iterator[Problem]:
    """Every value of a valid config that asks for a missing feature; keys that share a cause come as one."""
    known = leaf_fields(schema)
    for entry in NOT_YET:
        keys = [key for key in entry.keys if key in known and entry.asks(get(tree, key))]
        if keys:
            yield _grouped(keys, get(tree, keys[0]), entry.sentence.format(key=keys[0]))
    yield from _remote_paths(tree, schema)


def _remote_paths(tree: Mapping[str, Any], schema: type[Section]) -> Iterator[Problem]:
    found: dict[str, list[str]] = {}
    for key, field in leaf_fields(schema).items():
        if is_path(field) and key not in READ_LATER:
            value = get(tree, key)
            for path in [value] if isinstance(value, str) else value or ():
                if "://" in path:
                    found.setdefault(path, []).append(key)
    for path, keys in found.items():
        yield _grouped(keys, path, "remote file systems are not there yet. Give a local path.")


def _grouped(keys: list[str], value: Any, sentence: str) -> Problem:
    also = f"\nLikewise {', '.join(keys[1:])}." if keys[1:] else ""
    return Problem(keys[0], value, sentence + also, tuple(keys[1:]))


def later(key: str) -> str | None:
    """What a reader of the documentation should know of a key that is in these tables, or None."""
    if key in READ_LATER:
        return f"read by {READ_LATER[key]}, which is not there yet"
    return "not every value is there yet" if any(key in entry.keys for entry in NOT_YET) else None
