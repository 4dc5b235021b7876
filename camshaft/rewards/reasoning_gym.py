"""Reward for `reasoning-gym` tasks, computed by the scoring rule of the task.

    compute_score("reasoning_gym/gcd", "6", "6", row["extra_info"])                      # {"score": 1.0, "pred": "6"}
    compute_score("reasoning_gym/gcd", "2 * 3, so <answer>6</answer>", "6", row["extra_info"])      # same result

`extra_info` contains the `config` of the task and the `entry` of the question as JSON, both written by
`camshaft/data/reasoning_gym.py`. The answer is the content of the last <answer> block, or the whole response if it has
no such block, without surrounding whitespace. This function requires `pip install 'camshaft[reasoning-gym]'`.
"""

import json
import re
from functools import lru_cache
from typing import Any

from reasoning_gym import create_dataset

PREFIX = "reasoning_gym/"
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Return a score between 0 and 1. Many tasks give partial credit."""
    entry, config = (extra_info or {}).get("entry"), (extra_info or {}).get("config")
    if entry is None or config is None:
        raise ValueError(
            "extra_info must contain 'entry' and 'config'; generate the data with examples/data/reasoning_gym_task.py"
        )
    answers = _ANSWER.findall(solution_str)
    answer = (answers[-1] if answers else solution_str).strip()
    score = _create_task(data_source.removeprefix(PREFIX), config).score_answer(answer, json.loads(entry))
    return {"score": float(score), "correct": float(score == 1), "pred": answer or None}


@lru_cache(maxsize=64)
def _create_task(name: str, config: str) -> Any:
    return create_dataset(name, **json.loads(config))
