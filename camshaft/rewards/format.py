"""Format reward: score 1 if the response matches a pattern, otherwise 0, without checking the answer.

    compute_score("any", "<think>6 * 7</think> <answer>42</answer>", None)       # {"score": 1.0, "pred": "42"}
    compute_score("any", "Answer: 42", None, pattern="Answer: (?P<pred>[0-9]+)")  # {"score": 1.0, "pred": "42"}

The pattern is a regular expression that must match the whole response without surrounding whitespace. `.` also matches
newlines. The group named `pred`, if the pattern has one, is the extracted answer.
"""

import re
from typing import Any

THINK_AND_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?P<pred>(?:(?!</?answer>).)*)</answer>"
"""Pattern of one <think> block followed by one <answer> block, without other text."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, pattern: str = THINK_AND_ANSWER
) -> dict[str, Any]:
    """Match the response against the pattern and extract the answer."""
    match = re.fullmatch(pattern, solution_str.strip(), re.DOTALL)
    return {"score": float(match is not None), "pred": match.groupdict().get("pred") if match else None}
