"""Notices about keys that the user set although nothing reads them in this run.

    for notice in find_notices(config, tree, {"algorithm.kl_ctrl.kl_coef"}):
        logger.warning("config: %s", notice)

`PPO_RULES` and the other tables list the keys with the condition under which nothing reads them. `load.py` logs one
notice per rule after all checks have passed. Invalid settings are errors (`checks`).
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from camshaft.config.backends import ROLLOUTS, accelerator_keys, ignored_keys, rollouts_that_read, unread_keys
from camshaft.config.derive import shares_prompts
from camshaft.config.rollout import OPTIONAL_KEYS
from camshaft.config.schema.algorithm import ESTIMATORS, POLICY_LOSSES
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Section
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.roles import GeneratorConfig
from camshaft.config.schema.supervised import RMConfig, SFTConfig
from camshaft.config.tree import flatten, format_value, get, leaf_fields
from camshaft.masking import mask_value

ACTOR, REF, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
ROLLOUT, CRITIC, REWARD = "actor_rollout_ref.rollout", "critic", "reward_model"
CORRECTION, LOSS_MODE = "algorithm.rollout_correction", f"{ACTOR}.policy_loss.loss_mode"

DUAL_CLIP_LOSSES = ("vanilla",)
"""Built-in policy losses with a dual clip."""
OPTIMIZERS_WITHOUT_BETAS = ("SGD", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop", "Adafactor", "Muon")
"""Optimizers of torch.optim without the argument `betas`. The config must not import torch."""
_EMPTY = (None, (), [], {})
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
    rules = RULES[type(config)]
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


# -- conditions -----------------------------------------------------------------------------------


def _equals(key: str, *expected: Any) -> Condition:
    """Return a condition that is true if a key has one of the expected values."""
    return lambda config: _value(config, key) in expected


def _estimator_lacks(key: str) -> Condition:
    """Return a condition that is true if the formula of a built-in estimator does not contain a key of `algorithm`."""
    return _equals("algorithm.adv_estimator", *(name for name, inputs in ESTIMATORS.items() if key not in inputs.keys))


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


# -- rules of sections that several roles or commands have ----------------------------------------


def _switch_rule(switch: str, *keys: str, exempt: tuple[str, ...] = (), harmless: tuple[Any, ...] = ()) -> Rule:
    """Return the rule of keys that nothing reads if `switch` is false."""
    fix = f"set {switch}=true, or omit the key"
    return Rule(keys, _equals(switch, False), f"{{{switch}}}", fix, exempt, harmless)


def _model_rules(section: str) -> tuple[Rule, ...]:
    """Return the rules of a section `model`."""
    return (
        Rule(
            (f"{section}.use_remove_padding",), lambda config: True, "because batches are never padded",
            harmless=(True,),
        ),
        _switch_rule(f"{section}.enable_gradient_checkpointing", f"{section}.gradient_checkpointing_mode"),
        Rule(
            (f"{section}.lora_alpha", f"{section}.target_modules", f"{section}.exclude_modules"),
            _equals(f"{section}.lora_rank", 0), f"{{{section}.lora_rank}}",
            f"set {section}.lora_rank to the rank of the adapters, or omit the key",
        ),
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


def _optim_rules(section: str) -> tuple[Rule, ...]:
    """Return the rules of a section `optim`."""
    scheduler, warmup_steps = f"{section}.lr_scheduler_type", f"{section}.lr_warmup_steps"
    optimizer, overrides = f"{section}.optimizer", f"{section}.override_optimizer_config"
    constant, by_steps = _equals(scheduler, "constant"), lambda config: _value(config, warmup_steps) >= 0
    no_ratio = _equals(f"{section}.lr_warmup_steps_ratio", 0)
    return (
        Rule((f"{section}.min_lr_ratio",), constant, f"{{{scheduler}}}", f"set {scheduler}=cosine, or omit the key"),
        Rule(
            (f"{section}.num_cycles",), lambda config: _value(config, scheduler) != "cosine", f"{{{scheduler}}}",
            f"set {scheduler}=cosine, or omit the key",
        ),
        Rule((f"{section}.lr_warmup_steps_ratio",), by_steps, f"{{{warmup_steps}}}"),
        Rule(
            (f"{section}.total_training_steps",),
            lambda config: constant(config) and (by_steps(config) or no_ratio(config)),
            f"{{{scheduler}}}, because the learning rate does not depend on the length of the schedule",
            f"set {scheduler}=cosine, or omit the key", harmless=(-1,),
        ),
        Rule((f"{section}.betas",), _equals(optimizer, *OPTIMIZERS_WITHOUT_BETAS), f"{{{optimizer}}}"),
        Rule((f"{section}.weight_decay",), _equals(optimizer, "Rprop"), f"{{{optimizer}}}"),
        *(
            Rule((f"{section}.{name}",), partial(_is_overridden, overrides, name), f"{{{overrides}}}")
            for name in ("lr", "betas", "weight_decay")
        ),
    )  # fmt: skip


def _is_overridden(overrides: str, name: str, config: Any) -> bool:
    return name in _value(config, overrides)


def _sharding_rules(section: str, trained: bool = True) -> tuple[Rule, ...]:
    """Return the rules of a section `fsdp_config`."""
    offload = ("param_offload", "offload_policy", *(("grad_offload", "optimizer_offload") if trained else ()))
    min_num_params = f"{section}.wrap_policy.min_num_params"
    return (
        Rule(
            tuple(f"{section}.{name}" for name in offload), _on_cpu,
            "{trainer.device}, because everything is in CPU memory already", harmless=(False,),
        ),
        Rule(
            (f"{section}.wrap_policy.transformer_layer_cls_to_wrap",),
            lambda config: _value(config, min_num_params) > 0, f"{{{min_num_params}}}",
        ),
    )  # fmt: skip


def _micro_batch_rules(
    section: str, size: str, tokens: str, dynamic: str = "use_dynamic_bsz", has_global: bool = True
) -> tuple[Rule, ...]:
    """Return the rules of the keys that limit a micro-batch by sequences (`size`) or by tokens."""
    size, tokens, dynamic = f"{section}.{size}", f"{section}.{tokens}", f"{section}.{dynamic}"
    overall = size.removesuffix("_per_gpu")
    sizes = (size, overall) if has_global else (size,)
    rules = (
        Rule(sizes, _equals(dynamic, True), f"{{{dynamic}}}", f"set {tokens}, or omit the key"),
        _switch_rule(dynamic, tokens),
    )
    if not has_global:
        return rules
    return (*rules, Rule((overall,), lambda config: _value(config, size) is not None, f"{{{size}}}"))


def _greedy_rule(section: str, *names: str) -> Rule:
    """Return the rule of sampling parameters that greedy decoding does not read."""
    return _switch_rule(f"{section}.do_sample", *(f"{section}.{name}" for name in names), harmless=(0,))


def _rollout_rules(section: str) -> tuple[Rule, ...]:
    """Return the rules of the keys that only some rollouts read."""
    harmless = {"tensor_model_parallel_size": (1,), "enforce_eager": (True,), "free_cache_engine": (True,)}
    rules = []
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
    return leaf in ignored_keys(rollout.name, rollout.engine_kwargs)


def _is_unread(section: str, leaf: str, config: Any) -> bool:
    rollout = _value(config, section)
    return leaf in unread_keys(rollout.name, rollout.engine_kwargs)


def _needs_accelerator(section: str, leaf: str, config: Any) -> bool:
    rollout = _value(config, section)
    return _on_cpu(config) and leaf in accelerator_keys(rollout.name, rollout.engine_kwargs)


def _scoring_rule(unread: Condition, cause: str) -> Rule:
    return Rule(
        ("custom_reward_function",), unread, cause, "set custom_reward_function.name, or omit the key",
        ("custom_reward_function.path", "custom_reward_function.name"),
    )  # fmt: skip


_SEED_RULE = Rule(("data.seed",), _equals("data.shuffle", False), "{data.shuffle}")
_TRUNCATION_RULE = Rule(
    ("data.truncation",), _equals("data.filter_overlong_prompts", True),
    "{data.filter_overlong_prompts}, which drops overlong prompts", harmless=("error",),
)  # fmt: skip
_BEST_METRIC_RULE = Rule(
    ("trainer.best_metric_mode",), _equals("trainer.best_metric", None), "{trainer.best_metric}",
    "set trainer.best_metric, or omit the key",
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
    # data
    _SEED_RULE,
    _TRUNCATION_RULE,
    # roles that the run does not have
    Rule(
        (CRITIC, "trainer.max_critic_ckpt_to_keep"), lambda config: not config.needs_critic(),
        "{algorithm.adv_estimator} {critic.enable}, because the run has no critic",
        "set algorithm.adv_estimator=gae, or omit the key", ("critic.enable",),
    ),
    Rule(
        (REF,), lambda config: not config.needs_reference(),
        f"{{algorithm.use_kl_in_reward}} {{{ACTOR}.use_kl_loss}}, because the run has no reference model",
        f"set {ACTOR}.use_kl_loss=true, or omit the key",
    ),
    Rule(
        (REF,), lambda config: not config.needs_reference_model(),
        f"{{{MODEL}.lora_rank}}, because the reference is the actor with its adapter disabled",
    ),
    _switch_rule(f"{REWARD}.enable", REWARD, exempt=(f"{REWARD}.enable", f"{REWARD}.overlong_buffer")),
    # actor and its engine
    *_responses_model_rules(MODEL, ACTOR),
    *_optim_rules(f"{ACTOR}.optim"),
    *_sharding_rules(f"{ACTOR}.fsdp_config"),
    *_micro_batch_rules(ACTOR, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
    Rule(
        (f"{ACTOR}.clip_ratio",),
        lambda config: all(_value(config, f"{ACTOR}.clip_ratio_{side}") is not None for side in ("low", "high")),
        f"{{{ACTOR}.clip_ratio_low}} {{{ACTOR}.clip_ratio_high}}",
    ),
    Rule(
        tuple(f"{ACTOR}.clip_ratio{suffix}" for suffix in ("", "_low", "_high", "_c")), _never_clips,
        "because every iteration has one optimizer step, in which the probability ratio is 1",
        f"set {ACTOR}.ppo_mini_batch_size to less than data.train_batch_size, or omit the key",
    ),
    Rule(
        (f"{ACTOR}.clip_ratio_c",),
        _equals(LOSS_MODE, *(set(POLICY_LOSSES) - set(DUAL_CLIP_LOSSES))),
        f"{{{LOSS_MODE}}}, which has no dual clip",
    ),
    _switch_rule(f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
    # reference
    *_sharding_rules(f"{REF}.fsdp_config", trained=False),
    *_micro_batch_rules(REF, *_LOG_PROB_KEYS),
    # rollout
    *_rollout_rules(ROLLOUT),
    _greedy_rule(ROLLOUT, "top_k", "top_p", "min_p"),
    Rule(
        tuple(f"{ROLLOUT}.{name}" for name in ("log_prob_micro_batch_size", *_LOG_PROB_KEYS)),
        lambda config: not config.needs_log_prob_passes(),
        "because the actor computes no log-probs outside of updates (one optimizer step per iteration, or "
        f"{CORRECTION}.bypass_mode=true)",
    ),
    *_micro_batch_rules(ROLLOUT, *_LOG_PROB_KEYS),
    # critic
    *_responses_model_rules("critic.model", CRITIC),
    *_optim_rules("critic.optim"),
    *_sharding_rules("critic.model.fsdp_config"),
    *_micro_batch_rules(CRITIC, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
    *_micro_batch_rules(CRITIC, "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
    # scores
    *_sharding_rules(f"{REWARD}.model.fsdp_config", trained=False),
    *_micro_batch_rules(REWARD, "micro_batch_size_per_gpu", "forward_max_token_len_per_gpu"),
    Rule(
        (f"{REWARD}.weight",), lambda config: not config.needs_function(),
        "{custom_reward_function.name}, because the model score is the only score",
    ),
    _switch_rule(
        f"{REWARD}.overlong_buffer.enable",
        *(f"{REWARD}.overlong_buffer.{name}" for name in ("len", "penalty_factor", "log")),
    ),
    _scoring_rule(
        lambda config: not config.needs_function(),
        "{custom_reward_function.name}, because only the reward model scores",
    ),
    # algorithm
    Rule(
        ("algorithm.gamma",), _estimator_lacks("gamma"),
        "{algorithm.adv_estimator}, which does not discount rewards",
    ),
    Rule(
        ("algorithm.lam",), _estimator_lacks("lam"),
        "{algorithm.adv_estimator}", "set algorithm.adv_estimator=gae, or omit the key",
    ),
    Rule(
        ("algorithm.norm_adv_by_std_in_grpo",), _estimator_lacks("norm_adv_by_std_in_grpo"),
        "{algorithm.adv_estimator}", "set algorithm.adv_estimator=grpo, or omit the key",
    ),
    _switch_rule("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl"),
    Rule(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"), _equals("algorithm.kl_ctrl.type", "fixed"),
        "{algorithm.kl_ctrl.type}", "set algorithm.kl_ctrl.type=adaptive, or omit the key",
    ),
    _switch_rule(
        "algorithm.filter_groups.enable",
        "algorithm.filter_groups.metric",
        "algorithm.filter_groups.max_num_gen_batches",
    ),
    Rule(
        (f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_is_batch_normalize"),
        _equals(f"{CORRECTION}.rollout_is", None), f"{{{CORRECTION}.rollout_is}}",
        f"set {CORRECTION}.rollout_is=token, or omit the key",
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
    _greedy_rule(f"{ROLLOUT}.val_kwargs", "temperature", "top_k", "top_p", "min_p"),
    _BEST_METRIC_RULE,
    *CONTROLLER_RULES,
)  # fmt: skip
"""Rules of `camshaft ppo`. The first rule that applies to a key is reported."""

SUPERVISED_RULES = (
    _SEED_RULE,
    *_micro_batch_rules("data", "micro_batch_size_per_gpu", "max_token_len_per_gpu", has_global=False),
    *_model_rules("model"),
    *_optim_rules("optim"),
    *_sharding_rules("fsdp_config"),
    Rule(
        ("data.val_files",), _equals("trainer.test_freq", -1), "{trainer.test_freq}",
        "set trainer.test_freq=<steps>, or omit the key",
    ),
    _BEST_METRIC_RULE,
    Rule(("trainer.worker_timeouts.generate",), lambda config: True, "because the command does not generate"),
    *CONTROLLER_RULES,
)  # fmt: skip
"""Rules of `camshaft sft` and `camshaft rm`."""

GENERATE_RULES = (
    _TRUNCATION_RULE,
    *_rollout_rules("rollout"),
    _greedy_rule("rollout", "top_k", "top_p", "min_p"),
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
