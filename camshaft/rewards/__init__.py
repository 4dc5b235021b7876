"""Rewards: score responses with functions that run in isolated processes with time limits.

    from camshaft.rewards.manager import RewardManager
    with RewardManager(path="my_reward.py", name="compute_score", timeout=5.0) as rewards:
        result = rewards.score(batch, tokenizer.batch_decode)

A reward function is a sync or async function `compute_score(data_source, solution_str, ground_truth, extra_info)`. It
returns a number or a dict. The dict contains `score`, optionally `pred`, the extracted answer, and other numbers, which
are averaged and logged as metrics. A batched reward function has the parameters `data_sources, solution_strs,
ground_truths, extra_infos`; it is called once per batch and returns a list of results. `@register_reward("name")`
registers a function under a different name.

Modules:

    manager.py      scores batches; the interface to the trainer
    combined.py     adds the scores of a reward model
    overlong.py     subtracts a penalty for long responses
    pool.py         starts worker processes and sends them calls
    worker.py       main program of a worker process
    loading.py      loads functions by path and name
    callables.py    pickles functions that were passed from Python
    arguments.py    passes the arguments that a function has parameters for
    calls.py        calls functions in a worker, and converts results to replies
    messages.py     messages between pool and workers
    output.py       writes what reward functions print to a file
    auto.py         selects a built-in function by the data source of a row
    arithmetic.py, exact_match.py, format.py, gsm8k.py, math_answer.py, reasoning_gym.py    built-in functions

Every worker process imports this file, so it must not import torch.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from camshaft.errors import RewardError

Function = TypeVar("Function", bound=Callable[..., Any])

GROUP = "camshaft.rewards"

REGISTERED: dict[str, Callable[..., Any]] = {}
"""Functions that `register_reward` has registered in this process, by name."""


def register_reward(name: str) -> Callable[[Function], Function]:
    """Register the decorated function, so that `custom_reward_function.name=name` selects it."""

    def register(function: Function) -> Function:
        first = REGISTERED.setdefault(name, function)
        if first is not function:
            raise RewardError(
                f"two functions are registered as '{name}': {first.__qualname__} in {first.__module__} and "
                f"{function.__qualname__} in {function.__module__}; rename one of them"
            )
        return function

    return register
