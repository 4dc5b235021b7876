"""A reward that a random policy often gets in part: the share of even digits, plus the right answer.

The config key `custom_reward_function.path` names this file; tests also call the function directly.
"""

from typing import Any

EVEN = frozenset("02468")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    share = sum(character in EVEN for character in solution_str) / max(len(solution_str), 1)
    return share + (solution_str == ground_truth)
