"""Checks that engines and the built-in rollout support the families of the models, by config.json.

    problems = [*check_families(config)]        # the config of a command that uses a model

A model that is not on this machine yet is not checked. Nothing is built, and neither torch nor transformers is loaded.
"""

from collections.abc import Iterator
from dataclasses import replace

from camshaft import hub
from camshaft.config.auto.rules import PROMPTS
from camshaft.config.backends import engine_capabilities, generates_packed, select_options
from camshaft.config.checks.backends import MODEL, ROLLOUT, Role, ppo_roles, supervised_role, to_problem
from camshaft.config.engine import Conflict, invalid_options
from camshaft.config.errors import Problem, group_problems
from camshaft.config.families.known import complete_values
from camshaft.config.families.support import refusal, rope_limit
from camshaft.config.model_settings import ModelSettings, read_settings
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.roles import GeneratorConfig
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.errors import ConfigError


def check_families(config: PPOConfig | SupervisedConfig | GenerateConfig) -> Iterator[Problem]:
    """Check the models of all roles and of the rollout. The same problem of several roles is reported once."""
    if isinstance(config, GenerateConfig):
        settings = read_settings(config.model.path, config.model.override_config)
        awaits_data = config.is_automatic("rollout.prompt_length")
        yield from _check_generation("model.path", config.model.path, "rollout", config.rollout, settings, awaits_data)
        return
    problems: dict[tuple[str, str], list[Problem]] = {}
    for role in _roles(config):
        for conflict in _family_conflicts(role):
            problem = to_problem(role, conflict, (f"{role.model_key}.path",))
            problems.setdefault((role.model.path, conflict.message), []).append(problem)
    for same in problems.values():
        keys = list(dict.fromkeys(problem.key for problem in same))
        related = tuple(dict.fromkeys(key for problem in same for key in problem.related))
        grouped = group_problems(keys, same[0].value, same[0].message)
        yield replace(grouped, related=(*grouped.related, *related))
    if isinstance(config, PPOConfig) and not problems:
        model, key = config.actor_rollout_ref.model, f"{MODEL}.path"
        settings = read_settings(model.path, model.override_config)
        rollout, awaits_data = config.actor_rollout_ref.rollout, config.is_automatic(PROMPTS)
        yield from _check_generation(key, model.path, ROLLOUT, rollout, settings, awaits_data)


def _roles(config: PPOConfig | SupervisedConfig) -> list[Role]:
    """Return the roles with an engine of this package or a registered one."""
    if isinstance(config, SupervisedConfig):
        return [supervised_role(config)]
    groups = ppo_roles(config)
    return [role for group, _ in (groups[1:] if config.actor_rollout_ref.worker_cls else groups) for role in group]


def _family_conflicts(role: Role) -> Iterator[Conflict]:
    """Yield why the engine of a role does not support its model. Invalid options are reported by other checks."""
    settings = read_settings(role.model.path.removeprefix(hub.SCHEME), role.model.override_config)
    if settings is None or "model_type" not in settings.values:
        return
    try:
        engine = engine_capabilities(role.strategy)
    except ConfigError:
        return
    values = select_options(engine.options, role.settings, role.engine_kwargs)
    if not invalid_options(engine.options, values):
        options = engine.options.from_dict(values)
        yield from engine.family_conflicts(options, complete_values(settings.values), role.model)


def _check_generation(
    key: str, path: str, section: str, rollout: GeneratorConfig, settings: ModelSettings | None, awaits_data: bool
) -> Iterator[Problem]:
    """Report a model that the built-in rollout does not support, and rows that change its rotary frequencies.

    With `awaits_data`, the maximum prompt length is still the largest for any data.
    """
    if settings is None or not generates_packed(rollout.name, rollout.engine_kwargs):
        return
    values, name_key = complete_values(settings.values), f"{section}.name"
    if message := refusal("packed rows", values):
        yield Problem(name_key, rollout.name, f"{message}. Set {name_key}=hf.", (key,))
    limit, tokens = rope_limit(values), rollout.prompt_length + rollout.response_length
    if limit is not None and tokens > limit.tokens and not awaits_data:
        lengths = (f"{section}.prompt_length", f"{section}.response_length")
        message = (
            f"sequences can have {' + '.join(lengths)} = {tokens} tokens, but the '{limit.rope_type}' rotary "
            f"frequencies of this model change for all rows when one row exceeds {limit.tokens} tokens ({limit.key}). "
            f"Set smaller lengths, or {name_key}=hf."
        )
        yield Problem(key, path, message, (*lengths, name_key))
