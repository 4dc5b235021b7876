"""Reward for tasks of the `reasoning-gym` package, computed by the task's scoring rule.

    compute_score("reasoning_gym/gcd", "6", "6", row["extra_info"])                      # {"score": 1.0, "pred": "6"}
    compute_score("reasoning_gym/gcd", "2 * 3, so <answer>6</answer>", "6", row["extra_info"])      # the same

`extra_info` contains the task's `config` and `entry` as JSON, written by `camshaft/data/reasoning_gym.py`. The answer
is the content of the last <answer> block, or the whole response without surrounding whitespace. Requires
`pip install 'camshaft[reasoning-gym]'`.
"""

import json
import re
from functools import lru_cache
from typing import Any

from reasoning_gym import create_dataset

PREFIX = "reasoning_gym/"
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Score a response between 0 and 1; many tasks give partial credit."""
    entry, config = (extra_info or {}).get("entry"), (extra_info or {}).get("config")
    if entry is None or config is None:
        raise ValueError(
            "extra_info has no 'entry' and 'config'; generate the data with examples/data/reasoning_gym_task.py"
        )
    answers = _ANSWER.findall(solution_str)
    answer = (answers[-1] if answers else solution_str).strip()
    score = _task(data_source.removeprefix(PREFIX), config).score_answer(answer, json.loads(entry))
    return {"score": float(score), "correct": float(score == 1), "pred": answer or None}


@lru_cache(maxsize=64)
def _task(name: str, config: str) -> Any:
    return create_dataset(name, **json.loads(config))
