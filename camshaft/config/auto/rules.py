"""Rules for the values of keys that are `auto`, one per key."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from camshaft.config.backends import (
    ACCELERATOR_ROLLOUTS,
    BUILT_IN_ROLLOUT,
    SHARDED_ENGINE,
    SINGLE_PROCESS_ENGINE,
    TRANSFORMERS_ROLLOUT,
    engine_capabilities,
    freezes_bfloat16,
    rollout_capabilities,
    select_options,
    supports_mixed_precision,
)
from camshaft.config.engine import EngineModel
from camshaft.config.families.known import complete_values
from camshaft.config.families.support import runs_padded, unsupported
from camshaft.config.guards import is_mapping
from camshaft.config.model_settings import read_settings
from camshaft.config.schema.algorithm import ESTIMATORS, estimator_inputs
from camshaft.config.schema.engine import UPDATES, MicroBatchKeys
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import AUTO, Choice, Section
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.reward import SCORES
from camshaft.config.schema.roles import OLD_LOG_PROBS, REF_PASSES, VALUES
from camshaft.config.schema.supervised import SUPERVISED_UPDATES, RMConfig, SFTConfig
from camshaft.config.tree import get, has_key, put
from camshaft.errors import EngineError
from camshaft.machine import CPU, Machine

GROUP_SIZE = 8
"""Responses per prompt, if the responses to a prompt are compared with each other."""
RESPONSES_PER_STEP = 256
CPU_TOKENS = 4096
"""Tokens of a micro-batch on a CPU. More need more memory and are not faster (benchmarks/results/micro_batches.md)."""
MAX_PROMPT_LENGTH = 4096
"""Longest prompt in tokens that a run accepts if no maximum is set."""
SUPERVISED_BATCH = 64
_CHECKPOINTING = ("enable_gradient_checkpointing", "gradient_checkpointing_mode")
CHECKPOINTS_TO_KEEP = 2
"""Checkpoints that are kept if they are saved by time. A damaged newest one can be replaced by the one before it."""

EPOCHS = "trainer.total_epochs"
PROMPTS = "data.max_prompt_length"
BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
ROLLOUT_PROMPTS, GENERATED_PROMPTS = f"{ROLLOUT}.prompt_length", "rollout.prompt_length"
_ACTOR_DTYPE = f"{ACTOR}.fsdp_config.model_dtype"
_ACTOR_DYNAMIC, _ACTOR_TOKENS = f"{ACTOR}.{UPDATES.dynamic}", f"{ACTOR}.{UPDATES.tokens}"


@dataclass(frozen=True)
class Settings:
    """Values of a config, not validated yet, and the machine."""

    values: Mapping[str, Any]
    machine: Machine
    halvings: int = 0
    """Number of times that the tokens of a micro-batch on an accelerator are halved."""

    def get(self, key: str) -> Any:
        """Return the value of a key, or None if it does not exist."""
        return get(self.values, key) if has_key(self.values, key) else None

    def section(self, key: str) -> Mapping[str, Any]:
        """Return the value of a key if it is a mapping, and an empty mapping otherwise."""
        value = self.get(key)
        return value if is_mapping(value) else {}

    def count(self, key: str) -> int:
        """Return the value of a key if it is a positive integer, and 1 otherwise."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1

    def model_values(self, section: str) -> Mapping[str, Any]:
        """Return the values in the config.json of the model of a section; none if it cannot be read."""
        path = self.get(f"{section}.path")
        stored = read_settings(path, self.section(f"{section}.override_config")) if isinstance(path, str) else None
        return {} if stored is None else complete_values(stored.values)

    def on_cpu(self) -> bool:
        """Return True if the run uses no accelerator."""
        return str(self.get("trainer.device")).partition(":")[0] == CPU

    def ranks(self) -> int:
        """Return the number of ranks of the largest resource pool."""
        sections = ["trainer", *(f"trainer.resource_pools.{name}" for name in self.section("trainer.resource_pools"))]
        return max(self.count(f"{pool}.nnodes") * self.count(f"{pool}.n_gpus_per_node") for pool in sections)


Rule = Callable[[Settings], tuple[Any, str]]
"""Function that returns the value of a key and the reason for it. It may read keys whose rules come before.

A value without a reason, "", is not printed.
"""


def _device(settings: Settings) -> tuple[Any, str]:
    device, count = settings.machine.device, settings.machine.devices
    return device, "no accelerator found" if device == CPU else f"{count} accelerator{'s' * (count != 1)} found"


def _devices(settings: Settings) -> tuple[Any, str]:
    if settings.on_cpu():
        return 1, "one process on a CPU"
    if str(settings.get("trainer.device")).partition(":")[0] != settings.machine.device:
        return 1, "this machine has no such device"
    return settings.machine.devices, "all accelerators of this machine"


def _engine(settings: Settings) -> tuple[Any, str]:
    if settings.on_cpu() and settings.ranks() == 1:
        return SINGLE_PROCESS_ENGINE, "one process on a CPU"
    return SHARDED_ENGINE, "several processes on a CPU" if settings.on_cpu() else "runs on accelerators"


def _always(value: Any, reason: str) -> Rule:
    return lambda settings: (value, reason)


def _follow(key: str) -> Rule:
    return lambda settings: (settings.get(key), f"as {key}")


def _weight_dtype(strategy: str, model: str, settings: Settings) -> tuple[Any, str]:
    """Choose the dtype of the weights of a trained role from the keys of its engine and its model."""
    path, override = settings.get(f"{model}.path"), settings.section(f"{model}.override_config")
    if settings.on_cpu() or not settings.get(f"{model}.lora_rank") or not isinstance(path, str):
        return "float32", ""
    stored = read_settings(path, override)
    if stored is None or stored.dtype() != "bfloat16" or not freezes_bfloat16(str(settings.get(strategy))):
        return "float32", ""
    return "bfloat16", "dtype of the frozen weights in the model folder"


def _compute_dtype(strategy: str, section: str, settings: Settings) -> tuple[Any, str]:
    if settings.on_cpu():
        return None, "computes in the dtype of the weights on a CPU"
    is_float32 = settings.get(f"{section}.model_dtype") == "float32"
    if not is_float32 or not supports_mixed_precision(str(settings.get(strategy))):
        return None, "computes in the dtype of the weights"
    return "bfloat16", "with float32 weights in the optimizer"


def _compile(strategy: str, section: str, fsdp_config: str, model: str, settings: Settings) -> tuple[Any, str]:
    """Choose `use_torch_compile` in a section, with the keys of its engine, sharding and model."""
    if settings.on_cpu():
        return False, ""
    size = settings.get(f"{section}ulysses_sequence_parallel_size")
    keys = {**settings.section(fsdp_config), "ulysses_sequence_parallel_size": size, "use_torch_compile": True}
    kwargs = settings.section(f"{section}engine_kwargs")
    values = {key: settings.get(f"{model}.{key}") for key in _CHECKPOINTING}
    values = {key: value for key, value in values.items() if value is not None}
    if not _can_compile(str(settings.get(strategy)), keys, kwargs, values):
        return False, ""
    if "triton" not in settings.machine.libraries:
        return False, "triton is not installed"
    if runs_padded(settings.model_values(model)):
        return False, "the model runs on right-padded rows"
    return True, "fuses the operators between matrix products"


def _can_compile(
    strategy: str, keys: Mapping[str, Any], engine_kwargs: Mapping[str, Any], model: Mapping[str, Any]
) -> bool:
    """Return True if the engine has the option `use_torch_compile` and it conflicts with no other option."""
    try:
        schema = engine_capabilities(strategy).options
        options = schema.from_dict(select_options(schema, keys, engine_kwargs))
        return "use_torch_compile" in schema.model_fields and not list(options.conflicts(EngineModel(path="", **model)))
    except (ValueError, EngineError):  # the checks of the config report unknown engines and invalid values
        return False


def _eager(section: str, settings: Settings) -> tuple[Any, str]:
    """Choose `enforce_eager` in a section."""
    if settings.on_cpu():
        return True, ""
    replays = settings.get("actor_rollout_ref.actor.router_replay.mode") == "R3"
    if replays or settings.get(f"{section}.enable_return_routed_experts") is True:
        return True, "returns expert choices"
    return False, "captures decode steps as CUDA graphs"


def _rollout(model: str, settings: Settings) -> tuple[Any, str]:
    """Choose the rollout for the model of a section."""
    reasons = unsupported("packed rows", settings.model_values(model))
    name, reason = (TRANSFORMERS_ROLLOUT, f"the model has {reasons[0]}") if reasons else (BUILT_IN_ROLLOUT, "built in")
    if settings.on_cpu():
        return name, reason
    libraries = {name: str(rollout_capabilities(name).library) for name in ACCELERATOR_ROLLOUTS}
    installed = (name for name, library in libraries.items() if library in settings.machine.libraries)
    missing = ", ".join(libraries.values())
    library = next(installed, None)
    return (library, f"{library} is installed") if library else (name, f"{reason}; {missing} is not installed")


def _actor_dtype(settings: Settings) -> tuple[Any, str]:
    section = f"{ACTOR}.fsdp_config"
    dtype = settings.get(f"{section}.mixed_precision.param_dtype") or settings.get(f"{section}.model_dtype")
    return dtype, "same as the actor, the model that is trained"


def _generator_dtype(settings: Settings) -> tuple[Any, str]:
    return ("float32", "on a CPU") if settings.on_cpu() else ("bfloat16", "on accelerators")


def _group_size(settings: Settings) -> tuple[Any, str]:
    estimator = str(settings.get("algorithm.adv_estimator"))
    if not estimator_inputs(estimator).groups and settings.get("algorithm.filter_groups.enable") is not True:
        return 1, f"response per prompt; {estimator} does not compare the responses to a prompt"
    if estimator in ESTIMATORS:
        return GROUP_SIZE, "responses per prompt, compared with each other"
    return GROUP_SIZE, f"responses per prompt, which {estimator} may compare"


def _prompts_per_step(settings: Settings) -> tuple[Any, str]:
    """Return a number of prompts that gives every rank the same number of responses, and complete mini-batches."""
    n, ranks = settings.count(f"{ROLLOUT}.n"), settings.ranks()
    unit = math.lcm(settings.count(MINI_BATCH), ranks // math.gcd(n, ranks))
    prompts = -(-max(1, RESPONSES_PER_STEP // n) // unit) * unit
    return prompts, f"{prompts * n} responses per step"


def _supervised_batch(settings: Settings) -> tuple[Any, str]:
    ranks = settings.ranks()
    return -(-SUPERVISED_BATCH // ranks) * ranks, "rows per step"


def _prompt_length(response: str, models: Sequence[str], settings: Settings) -> tuple[Any, str]:
    """Choose the largest prompt length of a run, which `fit_to_prompts` lowers to that of its data.

    `response` is the key of the response length, and `models` are the sections of the models that read a sequence.
    """
    longest = MAX_PROMPT_LENGTH
    for section in models:
        path, override = settings.get(f"{section}.path"), settings.section(f"{section}.override_config")
        model = read_settings(path, override) if isinstance(path, str) and path else None
        if model is not None and (positions := model.positions()) is not None:
            longest = min(longest, positions[1] - settings.count(response))
    return max(1, longest), ""


def _ppo_prompt_length(settings: Settings) -> tuple[Any, str]:
    """Choose the largest prompt length of an RL run. A length that is set for the rollout applies to the data."""
    if _is_set(settings, ROLLOUT_PROMPTS):
        return settings.get(ROLLOUT_PROMPTS), ""
    models = ["actor_rollout_ref.model", "critic.model"]
    if settings.get("reward_model.enable") is True and settings.get("reward_model.max_length") is None:
        models.append("reward_model.model")
    return _prompt_length(f"{ROLLOUT}.response_length", models, settings)


def _limits_by_tokens(
    section: str, passes: Mapping[MicroBatchKeys, int | str], followed: str, settings: Settings
) -> tuple[Any, str]:
    """Choose the kind of limit of the micro-batches of a section."""
    if any(_is_set(settings, f"{section}.{size}") for keys in passes for size in keys.sizes):
        return False, ""
    is_set = any(_is_set(settings, f"{section}.{keys.tokens}", str(source)) for keys, source in passes.items())
    return is_set or not followed or settings.get(followed) is True, ""


def _is_set(settings: Settings, key: str, followed: str = "") -> bool:
    """Return True if a key has a value of its own, and not that of the key `followed`, which it has by default."""
    value = settings.get(key)
    return value not in (None, AUTO) and value != settings.get(followed)


def _sequences(section: str, keys: MicroBatchKeys, settings: Settings) -> tuple[Any, str]:
    """Choose the number of sequences of a micro-batch, unless another limit applies."""
    is_limited = any(_is_set(settings, f"{section}.{size}") for size in keys.sizes)
    if is_limited or settings.get(f"{section}.{keys.dynamic}") is not False:
        return None, ""
    return keys.sequences, "sequences per micro-batch"


def _tokens(source: int | str, longest: Callable[[Settings], int], dynamic: str, settings: Settings) -> tuple[Any, str]:
    """Choose the number of tokens of a micro-batch, which contains at least one sequence.

    `source` is the largest number on an accelerator, or the key of the passes whose limit applies. `dynamic` is the key
    that selects a limit by tokens.
    """
    if isinstance(source, str):
        tokens = settings.count(source)
    else:
        tokens = CPU_TOKENS if settings.on_cpu() else source >> settings.halvings
    return max(tokens, longest(settings)), "tokens per micro-batch" * (settings.get(dynamic) is True)


def longest_response(settings: Settings) -> int:
    """Return the maximum length of a prompt with its response."""
    return settings.count(PROMPTS) + settings.count(f"{ROLLOUT}.response_length")


def longest_scored(settings: Settings) -> int:
    """Return the maximum length of a sequence that the reward model scores."""
    return max(settings.count("reward_model.max_length"), longest_response(settings))


def _longest_row(sequences: int, settings: Settings) -> int:
    """Return the maximum length of a row of `sequences` sequences."""
    return sequences * settings.count("data.max_length")


def _validates_before(settings: Settings) -> tuple[Any, str]:
    has_data = bool(settings.get("data.val_files"))
    return has_data, "validation data is set" if has_data else "no validation data"


def _test_freq(settings: Settings) -> tuple[Any, str]:
    if not settings.get("data.val_files"):
        return -1, "no validation data"
    return AUTO, "up to a fifth of the time, and at the end"


def _epochs(default: int, settings: Settings) -> tuple[Any, str]:
    return (default if settings.get("trainer.total_training_steps") is None else None), ""


def _checkpoints_to_keep(settings: Settings) -> tuple[Any, str]:
    if settings.get("trainer.save_freq") == AUTO:
        return CHECKPOINTS_TO_KEEP, "the most recent checkpoints"
    return None, "keeps all checkpoints"


_SAVE_FREQ = _always(AUTO, "every 10 minutes, and at the end")
_PLACE: dict[str, Rule] = {"trainer.device": _device, "trainer.n_gpus_per_node": _devices}


def _micro_batches(
    section: str,
    passes: Mapping[MicroBatchKeys, int | str],
    longest: Callable[[Settings], int],
    followed: str = "",
) -> dict[str, Rule]:
    """Return the rules of the micro-batches of a section.

    Args:
        section: The section.
        passes: Keys of each kind of pass, with the source of its number of tokens.
        longest: Function that returns the length of the longest sequence.
        followed: Key that decides about a limit by tokens if no limit is set. "" selects such a limit, and prints it.
    """
    dynamic = f"{section}.{next(iter(passes)).dynamic}"
    rules: dict[str, Rule] = {dynamic: partial(_limits_by_tokens, section, passes, followed)}
    for keys, source in passes.items():
        rules[f"{section}.{keys.size}"] = partial(_sequences, section, keys)
        rules[f"{section}.{keys.tokens}"] = partial(_tokens, source, longest, dynamic)
    return {key: _without_reason(rule) for key, rule in rules.items()} if followed else rules


def _without_reason(rule: Rule) -> Rule:
    """Return a rule whose choice is not printed."""
    return lambda settings: (rule(settings)[0], "")


_SUPERVISED: dict[str, Rule] = {
    **_PLACE,
    "strategy": _engine,
    "fsdp_config.model_dtype": partial(_weight_dtype, "strategy", "model"),
    "fsdp_config.mixed_precision.param_dtype": partial(_compute_dtype, "strategy", "fsdp_config"),
    "use_torch_compile": partial(_compile, "strategy", "", "fsdp_config", "model"),
    BATCH: _supervised_batch,
    "trainer.test_freq": _test_freq,
    "trainer.save_freq": _SAVE_FREQ,
    "trainer.max_ckpt_to_keep": _checkpoints_to_keep,
}
_ENGINES = [
    (ACTOR, f"{ACTOR}.strategy", ACTOR, "actor_rollout_ref.model"),
    ("actor_rollout_ref.ref", f"{ACTOR}.strategy", "actor_rollout_ref.ref", "actor_rollout_ref.model"),
    ("critic", "critic.strategy", "critic.model", "critic.model"),
    ("reward_model", "reward_model.strategy", "reward_model.model", "reward_model.model"),
]
"""Sections of engines, with the key of the engine, and the sections of its `fsdp_config` and of its model."""

RULES: dict[type[Section], dict[str, Rule]] = {
    PPOConfig: {
        **_PLACE,
        f"{ACTOR}.strategy": _engine,
        "critic.strategy": _follow(f"{ACTOR}.strategy"),
        "reward_model.strategy": _follow(f"{ACTOR}.strategy"),
        _ACTOR_DTYPE: partial(_weight_dtype, f"{ACTOR}.strategy", "actor_rollout_ref.model"),
        f"{REF}.fsdp_config.model_dtype": _follow(_ACTOR_DTYPE),
        "critic.model.fsdp_config.model_dtype": partial(_weight_dtype, "critic.strategy", "critic.model"),
        "reward_model.model.fsdp_config.model_dtype": _follow(_ACTOR_DTYPE),
        **{
            f"{sharded}.fsdp_config.mixed_precision.param_dtype": partial(
                _compute_dtype, strategy, f"{sharded}.fsdp_config"
            )
            for _, strategy, sharded, _ in _ENGINES
        },
        f"{REF}.fsdp_config.mixed_precision.param_dtype": _follow(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"),
        **{
            f"{section}.use_torch_compile": partial(_compile, strategy, f"{section}.", f"{sharded}.fsdp_config", model)
            for section, strategy, sharded, model in _ENGINES
        },
        f"{ROLLOUT}.name": partial(_rollout, "actor_rollout_ref.model"),
        f"{ROLLOUT}.dtype": _actor_dtype,
        f"{ROLLOUT}.enforce_eager": partial(_eager, ROLLOUT),
        f"{ROLLOUT}.n": _group_size,
        BATCH: _prompts_per_step,
        MINI_BATCH: _follow(BATCH),
        **_micro_batches(ACTOR, {UPDATES: 16384}, longest_response),
        **_micro_batches(ROLLOUT, {OLD_LOG_PROBS: _ACTOR_TOKENS}, longest_response, _ACTOR_DYNAMIC),
        **_micro_batches(REF, {REF_PASSES: _ACTOR_TOKENS}, longest_response, _ACTOR_DYNAMIC),
        **_micro_batches(
            "critic", {UPDATES: 32768, VALUES: f"critic.{UPDATES.tokens}"}, longest_response, _ACTOR_DYNAMIC
        ),
        **_micro_batches(
            "reward_model", {SCORES: f"critic.{VALUES.tokens}"}, longest_scored, f"critic.{UPDATES.dynamic}"
        ),
        # After the limits by tokens, for which `fit_to_prompts` counts the prompts of the data.
        PROMPTS: _ppo_prompt_length,
        ROLLOUT_PROMPTS: _without_reason(_follow(PROMPTS)),
        "trainer.val_before_train": _validates_before,
        "trainer.test_freq": _test_freq,
        "trainer.save_freq": _SAVE_FREQ,
        "trainer.max_actor_ckpt_to_keep": _checkpoints_to_keep,
        EPOCHS: partial(_epochs, 30),
    },
    SFTConfig: {
        **_SUPERVISED,
        **_micro_batches("data", {SUPERVISED_UPDATES: 8192}, partial(_longest_row, 1)),
        EPOCHS: partial(_epochs, 4),
    },
    RMConfig: {
        **_SUPERVISED,
        **_micro_batches("data", {SUPERVISED_UPDATES: 8192}, partial(_longest_row, 2)),
        EPOCHS: partial(_epochs, 1),
    },
    GenerateConfig: {
        **_PLACE,
        "rollout.name": partial(_rollout, "model"),
        "rollout.dtype": _generator_dtype,
        "rollout.enforce_eager": partial(_eager, "rollout"),
        "rollout.n": _always(1, "one response to each prompt"),
        GENERATED_PROMPTS: partial(_prompt_length, "rollout.response_length", ("model",)),
    },
    EvalConfig: {},
}
"""Rules of the keys of each command that can be `auto`, in the order in which they are chosen."""


def choose(values: Mapping[str, Any], schema: type[Section], machine: Machine) -> list[Choice]:
    """Choose a value for each key that is `auto` in `values`, in which `${...}` is resolved."""
    chosen = copy.deepcopy(dict(values))
    choices: list[Choice] = []
    for key, rule in RULES[schema].items():
        if has_key(chosen, key) and get(chosen, key) == AUTO:
            follows_data = key == ROLLOUT_PROMPTS and any(choice.awaits_data for choice in choices)
            awaits_data = follows_data or key in (PROMPTS, GENERATED_PROMPTS)
            choice = Choice(key, *rule(Settings(chosen, machine)), awaits_data)
            put(chosen, key, choice.value)
            choices.append(choice)
    return choices
