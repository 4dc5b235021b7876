"""Exact-match reward: score 1 if the response or its last line equals the ground truth, otherwise 0.

compute_score("any", "Let me think.\\n42\\n", "42", {})      # {"score": 1.0, "pred": "42"}
"""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Compare response and ground truth, ignoring surrounding whitespace."""
    answer, truth = solution_str.strip(), str(ground_truth).strip()
    last_line = answer.splitlines()[-1].strip() if answer else ""
    return {"score": float(truth in (answer, last_line)), "pred": last_line or None}
