"""Rewards: user functions scored in isolated, time-limited processes.

    from camshaft.rewards.manager import RewardManager
    with RewardManager(path="my_reward.py", name="compute_score", timeout=5.0) as rewards:
        result = rewards.score(batch, tokenizer.batch_decode)

A reward function is `compute_score(data_source, solution_str, ground_truth, extra_info)`, plain or async,
and returns a number, or a dict with `score`, other numbers that are averaged into the metrics, and `pred`, the answer
that it found in the response. One that takes `data_sources, solution_strs, ground_truths, extra_infos` is called once
for the whole batch and returns a list of these. `@register_reward("name")` gives it another name than its own.

`manager.py` is what the trainer uses, `pool.py` the processes, `worker.py` what runs in them, `loading.py` how a
function is found there, `messages.py` the messages between, `failed.py` the list of samples that were not scored. The
functions to choose by name are in the modules that `camshaft.plugins.REWARDS` lists. This file is imported in each
worker and must stay free of torch.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from camshaft.errors import RewardError

Function = TypeVar("Function", bound=Callable[..., Any])

GROUP = "camshaft.rewards"

REGISTERED: dict[str, Callable[..., Any]] = {}
"""What `register_reward` has named, in this process."""


def register_reward(name: str) -> Callable[[Function], Function]:
    """Name the function below: `custom_reward_function.name=name` finds it in its file or module."""

    def register(function: Function) -> Function:
        taken = REGISTERED.setdefault(name, function)
        if taken is not function:
            raise RewardError(
                f"two functions are registered as '{name}': {taken.__qualname__} of {taken.__module__} and "
                f"{function.__qualname__} of {function.__module__}. Give one of them another name"
            )
        return function

    return register
