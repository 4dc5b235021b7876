"""A reward that a random policy often gets something of: the share of even digits, and the right answer.

Given to runs as `custom_reward_function.path`; a test may call it too.
"""

from typing import Any

EVEN = frozenset("02468")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    share = sum(character in EVEN for character in solution_str) / max(len(solution_str), 1)
    return share + (solution_str == ground_truth)
