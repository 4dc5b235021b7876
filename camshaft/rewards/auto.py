"""Default reward: score each row with the built-in function for its `data_source`.

compute_score("openai/gsm8k", "#### 42", "42")      # calls gsm8k.py
reward_for("reasoning_gym/gcd")                     # "reasoning_gym"
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from camshaft.errors import RewardError
from camshaft.plugins import REWARDS, import_attribute

SOURCES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo*": "math",
    "aime*": "math",
    "reasoning_gym/*": "reasoning_gym",
    "camshaft/arithmetic": "arithmetic",
}
"""Pattern of data sources (with the wildcard *) -> name in `REWARDS`."""


def reward_for(data_source: Any) -> str | None:
    """Return the name in `REWARDS` of the function for a data source, or None."""
    return next((name for source, name in SOURCES.items() if fnmatchcase(str(data_source), source)), None)


def check_sources(data_sources: Iterable[str], has_reward_model: bool) -> None:
    """Raise RewardError if there is a data source without a built-in function."""
    unknown = sorted(source for source in set(data_sources) if reward_for(source) is None)
    if unknown:
        raise RewardError(
            f"no reward is set, and data_source {', '.join(unknown[:5])} has no built-in reward function. Set "
            "reward=my_reward.py for a function of your own, or reward=exact_match to compare responses with the "
            f"ground truth. Without a reward, data_source must be one of {', '.join(SOURCES)}"
            + (", or custom_reward_function.name=null to score with the reward model only" if has_reward_model else "")
        )


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> float | dict[str, Any]:
    """Score a response with the function for its data source. Raise ValueError for an unknown data source."""
    name = reward_for(data_source)
    if name is None:
        raise ValueError(
            f"no built-in scoring function for data_source={data_source!r}; use one of {', '.join(SOURCES)}, or set "
            "custom_reward_function.path and name"
        )
    function = import_attribute(REWARDS[name])  # imported on first use, because some functions need optional libraries
    return function(data_source, solution_str, ground_truth, extra_info, **kwargs)
