"""The scoring function that fits a row's `data_source`: what runs when the config names none.

compute_score("openai/gsm8k", "#### 42", "42")      # that of gsm8k.py
reward_for("reasoning_gym/gcd")                     # "reasoning_gym"
"""

from fnmatch import fnmatchcase
from typing import Any

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
"""Which of `REWARDS` scores which data set; * stands for any text."""


def reward_for(data_source: Any) -> str | None:
    """The name in `REWARDS`, or None for a data set that nobody knows."""
    return next((name for source, name in SOURCES.items() if fnmatchcase(str(data_source), source)), None)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> float | dict[str, Any]:
    """The score by `SOURCES`; a data set that is not in it is an error."""
    name = reward_for(data_source)
    if name is None:
        raise ValueError(
            f"no scoring function is known for data_source={data_source!r} (known: {', '.join(SOURCES)}); "
            "name one of your own in the config"
        )
    function = import_attribute(REWARDS[name])  # when it is needed: some bring libraries along
    return function(data_source, solution_str, ground_truth, extra_info, **kwargs)
