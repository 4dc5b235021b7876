"""1 if the response has the form that a pattern describes, else 0; what stands in the form is not looked at.

    compute_score("any", "<think>6 * 7</think> <answer>42</answer>", None)       # {"score": 1.0, "pred": "42"}
    compute_score("any", "Answer: 42", None, pattern="Answer: (?P<pred>[0-9]+)")  # {"score": 1.0, "pred": "42"}

The pattern is a regular expression for the whole response without the space around it; a dot is any character. A group
called `pred` is the answer.
"""

import re
from typing import Any

THINK_AND_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?P<pred>(?:(?!</?answer>).)*)</answer>"
"""Each of the two once, in this order, and nothing else."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, pattern: str = THINK_AND_ANSWER
) -> dict[str, Any]:
    """Whether the response matches, and its answer."""
    found = re.fullmatch(pattern, solution_str.strip(), re.DOTALL)
    return {"score": float(found is not None), "pred": found.groupdict().get("pred") if found else None}
