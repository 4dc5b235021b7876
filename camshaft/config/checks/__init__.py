"""Checks of complete configs. Every check yields all problems that it finds.

    problems = list(check(config))        # the config of any command

A problem lists the keys that it depends on, so that `load.py` can omit it if one of them has an invalid value. Checks
of a single section are its method `problems`.

Modules
-------
    placement.py    resource pools, the controller, workers
    backends.py     engines and rollouts against their capabilities
    batches.py      batch sizes, token budgets and lengths, with the arithmetic
    algorithm.py    estimator, policy loss, rollout correction, dynamic sampling
    run.py          training data, validation, schedules, trackers, checkpoints
    families.py     families of models against engines and the built-in rollout
    model.py        lengths and tokenizers against models, and notices about models
    rewards.py      scoring functions, the reward model and the overlong penalty
    agents.py       episodes with environments
    staleness.py    training on batches of older weights
    ineffective.py  notices about keys that nothing reads in a run
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from camshaft.config.checks.agents import check_episodes, check_turns
from camshaft.config.checks.algorithm import check_algorithm
from camshaft.config.checks.backends import (
    check_load_format,
    check_ppo_engines,
    check_rollout,
    check_rollout_adapter,
    check_routed_experts,
    check_supervised_engines,
)
from camshaft.config.checks.batches import check_ppo_batches, check_supervised_batches, check_token_budgets
from camshaft.config.checks.families import check_families
from camshaft.config.checks.model import check_generate_models, check_ppo_models, check_supervised_models
from camshaft.config.checks.placement import check_placement, check_ppo_placement
from camshaft.config.checks.rewards import check_scores, check_scoring_function, check_token_budget_of_scores
from camshaft.config.checks.run import check_critic_warmup, check_run, check_supervised_run
from camshaft.config.checks.staleness import check_staleness
from camshaft.config.errors import Problem
from camshaft.config.files import check_eval_files, check_generate_files, check_ppo_files, check_supervised_files
from camshaft.config.schema.evaluation import EvalConfig
from camshaft.config.schema.fields import Section
from camshaft.config.schema.generate import GenerateConfig
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import SupervisedConfig

__all__ = ["check", "check_critic_warmup", "check_families", "check_lengths"]


def check(config: PPOConfig | SupervisedConfig | GenerateConfig | EvalConfig) -> Iterator[Problem]:
    """Yield every problem of a config. Its single values must be valid already."""
    if isinstance(config, GenerateConfig):
        yield from check_placement(config.trainer)
        yield from check_rollout("rollout", config.rollout, config.trainer.world_size)
        yield from check_load_format("rollout", config.rollout, None)
        yield from check_turns("rollout", config.rollout)
        if not config.data.path:
            yield Problem("data.path", None, "prompts are required. Set data=<file>.")
        yield from check_scoring_function(config.custom_reward_function)
        yield from check_generate_files(config)
        yield from check_generate_models(config)
    elif isinstance(config, EvalConfig):
        yield from check_scoring_function(config.custom_reward_function)
        yield from check_eval_files(config)
    elif isinstance(config, SupervisedConfig):
        yield from check_placement(config.trainer)
        yield from check_supervised_engines(config)
        yield from check_supervised_batches(config)
        yield from check_supervised_run(config)
        yield from check_supervised_files(config)
        yield from check_supervised_models(config)
    else:
        yield from _check_ppo(config)
    if not isinstance(config, EvalConfig):
        yield from check_families(config)
    yield from _section_problems(config, "")


def check_lengths(config: PPOConfig | GenerateConfig) -> Iterator[Problem]:
    """Yield the problems of a config whose prompt length was taken from the data, with models on this machine."""
    if isinstance(config, GenerateConfig):
        yield from check_generate_models(config)
        return
    yield from check_token_budgets(config)
    if config.needs_reward_engine():
        yield from check_token_budget_of_scores(config)
    yield from check_ppo_models(config)


def _check_ppo(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    yield from check_ppo_placement(config)
    yield from check_staleness(config)
    ranks, pool = config.topology().rollout_topology().world_size, config.pools().get("rollout")
    yield from check_rollout("actor_rollout_ref.rollout", rollout, ranks, pool)
    yield from check_scores(config)
    yield from check_episodes(config)
    yield from check_ppo_engines(config)
    yield from check_rollout_adapter(config)
    yield from check_routed_experts(config)
    yield from check_load_format("actor_rollout_ref.rollout", rollout, config.actor_rollout_ref.actor.strategy)
    yield from check_ppo_batches(config)
    yield from check_algorithm(config)
    yield from check_run(config)
    yield from check_ppo_files(config)
    yield from check_ppo_models(config)


def _section_problems(section: Section, prefix: str) -> Iterator[Problem]:
    """Yield the problems of a section and those in it, with complete keys."""
    for problem in section.problems():
        message = re.sub(r"\[([a-z][\w.]+)\]", rf"{prefix}\1", problem.message)
        related = tuple(f"{prefix}{key}" for key in problem.related)
        yield replace(problem, key=f"{prefix}{problem.key}", message=message, related=related)
    for name, value in section:
        if isinstance(value, Section):
            yield from _section_problems(value, f"{prefix}{name}.")
