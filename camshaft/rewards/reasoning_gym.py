"""The score of a task of the `reasoning-gym` package, by the task's own rule.

    compute_score("reasoning_gym/gcd", "6", "6", row["extra_info"])                      # {"score": 1.0, "pred": "6"}
    compute_score("reasoning_gym/gcd", "2 * 3, so <answer>6</answer>", "6", row["extra_info"])      # the same

`extra_info` is what `camshaft/data/reasoning_gym.py` writes: the task's `config` and the `entry`, both as JSON. The
answer is what stands in the last <answer> of the response, or the whole response without the space around it.
Needs `pip install 'camshaft[reasoning-gym]'`.
"""

import json
import re
from functools import lru_cache
from typing import Any

from reasoning_gym import create_dataset

PREFIX = "reasoning_gym/"
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Between 0 and 1: many tasks give something for an answer that is nearly right."""
    entry, config = (extra_info or {}).get("entry"), (extra_info or {}).get("config")
    if entry is None or config is None:
        raise ValueError(
            "extra_info has no 'entry' and 'config': files of these tasks are written by "
            "examples/data/reasoning_gym_task.py"
        )
    found = _ANSWER.findall(solution_str)
    answer = (found[-1] if found else solution_str).strip()
    score = _task(data_source.removeprefix(PREFIX), config).score_answer(answer, json.loads(entry))
    return {"score": float(score), "correct": float(score == 1), "pred": answer or None}


@lru_cache(maxsize=64)
def _task(name: str, config: str) -> Any:
    return create_dataset(name, **json.loads(config))
