"""Rewards: run scoring functions in isolated processes with time limits.

    from camshaft.rewards.manager import RewardManager
    with RewardManager(path="my_reward.py", name="compute_score", timeout=5.0) as rewards:
        result = rewards.score(batch, tokenizer.batch_decode)

A reward function is `compute_score(data_source, solution_str, ground_truth, extra_info)`, sync or async. It returns a
number or a dict with `score`, further numbers that are averaged into metrics, and `pred`, the extracted answer. A
function with the parameters `data_sources, solution_strs, ground_truths, extra_infos` is called once per batch and
returns a list of results. `@register_reward("name")` registers a function under another name.

Modules:

    manager.py      score batches; the interface of the trainer
    combined.py     add the scores of a reward model
    overlong.py     penalty for long responses
    pool.py         worker processes
    worker.py       main program of a worker process
    loading.py      load a function by path and name
    messages.py     messages between manager and workers
    auto.py, arithmetic.py, exact_match.py, format.py, gsm8k.py, math_answer.py, reasoning_gym.py: built-in functions

This file is imported in each worker and must not import torch.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from camshaft.errors import RewardError

Function = TypeVar("Function", bound=Callable[..., Any])

GROUP = "camshaft.rewards"

REGISTERED: dict[str, Callable[..., Any]] = {}
"""Functions registered by `register_reward` in this process."""


def register_reward(name: str) -> Callable[[Function], Function]:
    """Register the decorated function, so that `custom_reward_function.name=name` selects it."""

    def register(function: Function) -> Function:
        registered = REGISTERED.setdefault(name, function)
        if registered is not function:
            raise RewardError(
                f"two functions are registered as '{name}': {registered.__qualname__} of {registered.__module__} and "
                f"{function.__qualname__} of {function.__module__}. Rename one of them"
            )
        return function

    return register
