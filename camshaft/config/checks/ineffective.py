"""Notices about keys that the user set although nothing reads them in this run.

    for notice in find_notices(config, tree, {"algorithm.kl_ctrl.kl_coef"}):
        logger.warning("config: %s", notice)

A condition that depends on the section of a key stands at its field (`key(..., unread=...)`). `PPO_RULES` and the other
tables list the conditions that depend on several sections, and take precedence. `load.py` logs one notice per rule
after all checks have passed. Invalid settings are errors (`checks`).
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from camshaft.config.backends import ROLLOUTS, rollouts_that_read, unread_keys, used_capabilities
from camshaft.config.checks.placement import HYBRID, ROLLOUT_KEY
from camshaft.config.derive import shares_prompts
from camshaft.config.rollout import OPTIONAL_KEYS
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Section, Unread, marks
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.policy_loss import POLICY_LOSSES
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.roles import GeneratorConfig
from camshaft.config.schema.supervised import RMConfig, SFTConfig
from camshaft.config.tree import fields, flatten, format_value, get, leaf_fields
from camshaft.masking import mask_value

ACTOR, REF, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
ROLLOUT, CRITIC, REWARD = "actor_rollout_ref.rollout", "critic", "reward_model"
CORRECTION, LOSS_MODE = "algorithm.rollout_correction", f"{ACTOR}.policy_loss.loss_mode"

_EMPTY: tuple[Any, ...] = (None, (), [], {})
"""Values that leave a setting to its default, so setting them has no effect in any run."""

Condition = Callable[[Any], bool]
"""Predicate on the config of a command."""


@dataclass(frozen=True)
class Rule:
    """Keys that nothing reads if `unread` is true."""

    keys: tuple[str, ...]
    """Keys, or sections with all their keys."""
    unread: Condition
    cause: str
    """Settings that cause it, completing the sentence "has no effect with ...", or a clause that starts with because.
    `{key}` stands for key=value."""
    fix: str = "omit the key"
    exempt: tuple[str, ...] = ()
    """Keys and sections in `keys` that are read anyway."""
    harmless: tuple[Any, ...] = ()
    """Values that describe what the run does anyway. Setting them is not reported."""

    def covers(self, key: str) -> bool:
        """Return True if the rule applies to a key."""
        return _contains(self.keys, key) and not _contains(self.exempt, key)


def _contains(keys: Collection[str], key: str) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def find_notices(config: Section, tree: Mapping[str, Any], user_keys: Collection[str]) -> Iterator[str]:
    """Yield a notice for each rule that applies to keys in `user_keys`.

    `tree` is the config before `${...}` is resolved. A key is read if a key that refers to it is read.
    """
    leaves, values = leaf_fields(type(config)), config.model_dump()
    written = {key: str(value) for key, value in flatten(tree, leaves).items() if "${" in str(value)}
    settings: dict[Rule, list[str]] = {}
    for key in leaves:
        if key in user_keys and get(values, key) not in _EMPTY:
            rule = _rule_of(key, config, written)
            if rule is not None and get(values, key) not in rule.harmless:
                settings.setdefault(rule, []).append(_setting(key, values))
    for rule, keys in settings.items():
        cause = re.sub(r"\{([\w.]+)\}", lambda match: _setting(match[1], values), rule.cause)
        cause = cause if cause.startswith("because") else f"with {cause}"
        yield f"{', '.join(keys)} {'have' if keys[1:] else 'has'} no effect {cause}; {rule.fix}"


def _setting(key: str, values: Mapping[str, Any]) -> str:
    return f"{key}={format_value(mask_value(get(values, key)))}"


def _rule_of(key: str, config: Section, written: Mapping[str, str]) -> Rule | None:
    """Return the rule by which nothing reads a key, or None if the key is read."""
    rules = (*RULES.get(type(config), ()), *field_rules(type(config)))
    if _contains(_custom_sections(config), key):
        return None
    rule = next((rule for rule in rules if rule.covers(key) and rule.unread(config)), None)
    references = [other for other, value in written.items() if f"${{{key}}}" in value]
    return rule if all(_rule_of(other, config, written) is not None for other in references) else None


def _custom_sections(config: Section) -> list[str]:
    """Return the sections of the roles that run a class of the user, which may read any key of its section."""
    if not isinstance(config, PPOConfig):
        return []
    classes = {
        "actor_rollout_ref": config.actor_rollout_ref.worker_cls,
        CRITIC: config.critic.worker_cls if config.needs_critic() else None,
        REWARD: config.reward_model.worker_cls if config.reward_model.enable else None,
    }
    return [section for section, name in classes.items() if name is not None]


# -- conditions at the fields ---------------------------------------------------------------------


@cache
def field_rules(schema: type[Section]) -> tuple[Rule, ...]:
    """Return a rule for each condition `unread` at the fields of a schema, with all keys that it applies to."""
    keys: dict[tuple[str, Unread], list[str]] = {}
    for key, field in fields(schema).items():
        for unread in marks(field, Unread):
            keys.setdefault((key.rpartition(".")[0], unread), []).append(key)
    return tuple(_field_rule(section, unread, tuple(names)) for (section, unread), names in keys.items())


def _field_rule(section: str, unread: Unread, keys: tuple[str, ...]) -> Rule:
    prefix = f"{section}." if section else ""
    return Rule(
        keys,
        lambda config: unread.test(_value(config, section) if section else config),
        re.sub(r"\{([\w.]+)\}", rf"{{{prefix}\1}}", unread.cause),
        re.sub(r"\[(\w+)\]", rf"{prefix}\1", unread.fix),
        harmless=unread.harmless,
    )


# -- conditions -----------------------------------------------------------------------------------


def _equals(key: str, *expected: Any) -> Condition:
    """Return a condition that is true if a key has one of the expected values."""
    return lambda config: _value(config, key) in expected


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _on_cpu(config: Any) -> bool:
    return config.trainer.device.partition(":")[0] == "cpu"


def _calls_no_process(config: Any) -> bool:
    """Return True if all models are in this process, so that calls of their methods have no time limit."""
    trainer = config.trainer
    if trainer.backend() == "ray" or trainer.world_size > 1:
        return False
    if isinstance(config, GenerateConfig):
        return _generates_here(config.rollout)
    if trainer.default_hdfs_dir is not None:
        return False
    if not isinstance(config, PPOConfig):
        return not config.checkpoint.async_save
    roles, critic = config.actor_rollout_ref, config.critic
    is_single = config.topology().world_size == len(set(config.pools().values())) == 1
    saves_here = not roles.actor.checkpoint.async_save and not (config.needs_critic() and critic.checkpoint.async_save)
    return is_single and saves_here and _generates_here(roles.rollout) and not _custom_sections(config)


def _generates_here(rollout: GeneratorConfig) -> bool:
    """Return True for a built-in rollout that runs the model in the process of its rank."""
    backend = ROLLOUTS.get(rollout.name)
    return backend is not None and backend.capabilities.library is None and backend.capabilities.wraps is None


def _without_validation(config: PPOConfig) -> bool:
    trainer = config.trainer
    return not trainer.val_before_train and not trainer.val_only and trainer.test_freq == -1


def _never_clips(config: PPOConfig) -> bool:
    return config.old_log_prob_source() == "update" and _value(config, LOSS_MODE) in POLICY_LOSSES


def _is_reinforce(config: PPOConfig) -> bool:
    correction = config.algorithm.rollout_correction
    return correction.bypass_mode and correction.loss_type == "reinforce"


# -- rules of sections that several roles or commands have ----------------------------------------


def _model_rules(section: str) -> tuple[Rule, ...]:
    """Return the rules of a section `model`."""
    return (
        Rule(
            (f"{section}.enable_activation_offload",), _on_cpu,
            "{trainer.device}, because activations are in CPU memory already", harmless=(False,),
        ),
    )  # fmt: skip


def _responses_model_rules(section: str, role: str) -> tuple[Rule, ...]:
    """Return the rules of a section `model`, whose `role` processes several responses per prompt."""
    requirements = "a CPU or computation in half precision, and an engine that supports it"
    return (
        *_model_rules(section),
        Rule(
            (f"{section}.use_prefix_grouper",),
            lambda config: not shares_prompts(config, _value(config, role)),
            f"{{trainer.device}} {{{role}.strategy}}, because prefix sharing requires {requirements}",
            harmless=(False,),
        ),
    )  # fmt: skip


def _sharding_rules(section: str, trained: bool = True) -> tuple[Rule, ...]:
    """Return the rules of a section `fsdp_config`."""
    offload = ("param_offload", "offload_policy", *(("grad_offload", "optimizer_offload") if trained else ()))
    return (
        Rule(
            tuple(f"{section}.{name}" for name in offload), _on_cpu,
            "{trainer.device}, because everything is in CPU memory already", harmless=(False,),
        ),
    )  # fmt: skip


def _rollout_rules(section: str) -> tuple[Rule, ...]:
    """Return the rules of the keys that only some rollouts read."""
    harmless = {"tensor_model_parallel_size": (1,), "enforce_eager": (True,), "free_cache_engine": (True,)}
    rules: list[Rule] = []
    for leaf in (*OPTIONAL_KEYS, "max_num_batched_tokens"):
        key, values = f"{section}.{leaf}", harmless.get(leaf, ())
        readers = f"this key is read only with {section}.name={', '.join(rollouts_that_read(leaf))}"
        causes = (
            (_is_ignored, f"these options in {section}.engine_kwargs", "set the option of the running server"),
            (_is_unread, f"{{{section}.name}}", readers),
            (_needs_accelerator, f"{{{section}.name}} {{trainer.device}}", "omit the key"),
        )
        rules += [
            Rule((key,), partial(unread, section, leaf), cause, fix, harmless=values) for unread, cause, fix in causes
        ]
    return tuple(rules)


def _is_ignored(section: str, leaf: str, config: Any) -> bool:
    rollout = _value(config, section)
    options = used_capabilities(rollout.name, rollout.engine_kwargs).options
    return leaf in options.ignored_keys(rollout.engine_kwargs)


def _is_unread(section: str, leaf: str, config: Any) -> bool:
    rollout = _value(config, section)
    return leaf in unread_keys(rollout.name, rollout.engine_kwargs)


def _needs_accelerator(section: str, leaf: str, config: Any) -> bool:
    rollout = _value(config, section)
    return _on_cpu(config) and leaf in used_capabilities(rollout.name, rollout.engine_kwargs).accelerator_keys


def _scoring_rule(unread: Condition, cause: str, read: tuple[str, ...] = ()) -> Rule:
    return Rule(
        ("custom_reward_function",), unread, cause, "set custom_reward_function.name, or omit the key",
        ("custom_reward_function.path", "custom_reward_function.name", *read),
    )  # fmt: skip


CONTROLLER_RULES = (
    Rule(
        ("trainer.cpus_per_rank", "ray_kwargs"), lambda config: config.trainer.backend() != "ray",
        "{trainer.controller}, because the run does not use Ray", "set trainer.controller=ray, or omit the key",
    ),
    Rule(
        ("trainer.worker_timeouts",), _calls_no_process,
        "because all models of this run are in a single process",
    ),
)  # fmt: skip


# -- tables ---------------------------------------------------------------------------------------

_LOG_PROB_KEYS = ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz")

PPO_RULES = (
    # roles that the run does not have
    Rule(
        (CRITIC, "trainer.max_critic_ckpt_to_keep"), lambda config: not config.needs_critic(),
        "{algorithm.adv_estimator} {critic.enable}, because the run has no critic",
        "set algorithm.adv_estimator=gae, or omit the key", ("critic.enable",),
    ),
    Rule(
        (REF,), lambda config: not config.kl_plan().is_used,
        f"{{algorithm.use_kl_in_reward}} {{{ACTOR}.use_kl_loss}}, because the run has no reference model",
        f"set {ACTOR}.use_kl_loss=true, or omit the key",
    ),
    Rule(
        (REF,), lambda config: not config.kl_plan().needs_model,
        f"{{{MODEL}.lora_rank}}, because the reference is the actor with its adapter disabled",
    ),
    Rule(
        (REWARD,), _equals(f"{REWARD}.enable", False), f"{{{REWARD}.enable}}",
        f"set {REWARD}.enable=true, or omit the key", (f"{REWARD}.enable", f"{REWARD}.overlong_buffer"),
    ),
    # actor and its engine
    *_responses_model_rules(MODEL, ACTOR),
    *_sharding_rules(f"{ACTOR}.fsdp_config"),
    Rule(
        (*(f"{ACTOR}.clip_ratio{suffix}" for suffix in ("", "_low", "_high", "_c")), f"{ACTOR}.policy_loss"),
        _never_clips,
        "because every iteration has one optimizer step, in which the probability ratio is 1",
        f"set {ACTOR}.ppo_mini_batch_size to less than data.train_batch_size, or omit the key", (LOSS_MODE,),
    ),
    Rule(
        (*(f"{ACTOR}.clip_ratio{suffix}" for suffix in ("", "_low", "_high", "_c")), f"{ACTOR}.policy_loss"),
        _is_reinforce, f"{{{CORRECTION}.bypass_mode}} {{{CORRECTION}.loss_type}}, the policy gradient without a clip",
        f"set {CORRECTION}.loss_type=ppo_clip, or omit the key",
    ),
    # reference
    *_sharding_rules(f"{REF}.fsdp_config", trained=False),
    # rollout
    Rule(
        (ROLLOUT_KEY, f"{ROLLOUT}.max_restarts"), _equals(HYBRID, True),
        f"{{{HYBRID}}}, because the rollout is on the devices of the actor", f"set {HYBRID}=false, or omit the key",
    ),
    Rule(
        (f"{ROLLOUT}.free_cache_engine",), _equals(HYBRID, False),
        f"{{{HYBRID}}}, because the rollout does not share its devices", harmless=(False,),
    ),
    *_rollout_rules(ROLLOUT),
    Rule(
        tuple(f"{ROLLOUT}.{name}" for name in ("log_prob_micro_batch_size", *_LOG_PROB_KEYS)),
        lambda config: not config.needs_log_prob_passes(),
        "because the actor computes no log-probs outside of updates (one optimizer step per iteration, or "
        f"{CORRECTION}.bypass_mode=true)",
    ),
    # critic
    *_responses_model_rules("critic.model", CRITIC),
    *_sharding_rules("critic.model.fsdp_config"),
    # scores
    *_sharding_rules(f"{REWARD}.model.fsdp_config", trained=False),
    Rule(
        (f"{REWARD}.weight",), lambda config: not config.needs_function(),
        "{custom_reward_function.name}, because the model score is the only score",
    ),
    _scoring_rule(
        lambda config: not config.needs_function() and config.plays_episodes(),
        "{custom_reward_function.name}, because the environment scores", ("custom_reward_function.on_error",),
    ),
    _scoring_rule(
        lambda config: not config.needs_function() and not config.plays_episodes(),
        "{custom_reward_function.name}, because only the reward model scores",
    ),
    # validation and run
    Rule(
        (
            "data.val_files", "data.val_batch_size", "data.val_max_samples", f"{ROLLOUT}.val_kwargs",
            "trainer.log_val_generations", "trainer.validation_data_dir",
        ),
        _without_validation, "{trainer.val_before_train} {trainer.test_freq}, because the run does not validate",
        "set trainer.test_freq=<iterations>, or omit the key",
    ),
    *CONTROLLER_RULES,
)  # fmt: skip
"""Rules of `camshaft ppo`. The first rule that applies to a key is reported."""

SUPERVISED_RULES = (
    *_model_rules("model"),
    *_sharding_rules("fsdp_config"),
    Rule(
        ("data.val_files",), _equals("trainer.test_freq", -1), "{trainer.test_freq}",
        "set trainer.test_freq=<steps>, or omit the key",
    ),
    Rule(("trainer.worker_timeouts.generate",), lambda config: True, "because the command does not generate"),
    *CONTROLLER_RULES,
)  # fmt: skip
"""Rules of `camshaft sft` and `camshaft rm`."""

GENERATE_RULES = (
    *_rollout_rules("rollout"),
    _scoring_rule(
        lambda config: not config.custom_reward_function.is_named(),
        "{custom_reward_function.name}, because responses are not scored",
    ),
    Rule(
        ("data.reward_fn_key",), lambda config: not config.custom_reward_function.is_named(),
        "{custom_reward_function.name}, because responses are not scored",
        "set custom_reward_function.name, or omit the key",
    ),
    Rule(
        ("trainer.worker_timeouts.update", "trainer.worker_timeouts.save"), lambda config: True,
        "because the command does not train",
    ),
    *CONTROLLER_RULES,
)  # fmt: skip
"""Rules of `camshaft generate`."""

RULES: dict[type[Section], tuple[Rule, ...]] = {
    PPOConfig: PPO_RULES,
    SFTConfig: SUPERVISED_RULES,
    RMConfig: SUPERVISED_RULES,
    GenerateConfig: GENERATE_RULES,
    EvalConfig: (),
}
"""Rules of each command. `camshaft eval` reads all its keys."""
