"""The scoring function that fits a row's `data_source`: what runs when the config names none.

compute_score("openai/gsm8k", "#### 42", "42")      # that of gsm8k.py
"""

from typing import Any

from camshaft.rewards import arithmetic, gsm8k

SOURCES = {
    "openai/gsm8k": gsm8k.compute_score,
    "camshaft/arithmetic": arithmetic.compute_score,
}
"""Which function scores which data set."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> float | dict[str, Any]:
    """The score by `SOURCES`; a data set that is not in it is an error."""
    if data_source not in SOURCES:
        raise ValueError(
            f"no scoring function is known for data_source={data_source!r} (known: {', '.join(SOURCES)}); "
            "name one of your own in the config"
        )
    return SOURCES[data_source](data_source, solution_str, ground_truth, extra_info, **kwargs)
