"""1 if the answer equals the ground truth, else 0. The answer is the whole response, or its last line.

compute_score("any", "Let me think.\\n42\\n", "42", {})      # {"score": 1.0, "pred": "42"}
"""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Space around the texts does not count."""
    answer, truth = solution_str.strip(), str(ground_truth).strip()
    last_line = answer.splitlines()[-1].strip() if answer else ""
    return {"score": float(truth in (answer, last_line)), "pred": last_line or None}
