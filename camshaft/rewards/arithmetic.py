"""Reward for the built-in arithmetic data: exact match of the result, with partial credit for any integer.

compute_score("camshaft/arithmetic", "47", "47")       # {"score": 1.0, "correct": 1.0, "format": 1.0, "pred": "47"}
compute_score("camshaft/arithmetic", "46", "47")       # {"score": 0.1, "correct": 0.0, "format": 1.0, "pred": "46"}
"""

import re
from typing import Any

_INTEGER = re.compile(r"-?\d+", re.ASCII)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, format_score: float = 0.1
) -> dict[str, Any]:
    """Return score 1 for the correct number, `format_score` for any other integer, and 0 for other text."""
    answer = solution_str.strip()
    correct = answer == str(ground_truth)
    is_integer = bool(_INTEGER.fullmatch(answer))
    score = 1.0 if correct else format_score * is_integer
    pred = answer if is_integer else None
    return {"score": score, "correct": float(correct), "format": float(is_integer), "pred": pred}
