"""Grade-school mathematics: the answer is the number after `####`.

    compute_score("openai/gsm8k", "6 * 7 = 42\\n#### 42", "42")                    # 1.0
    compute_score("openai/gsm8k", "it is 42", "42")                               # 0.0
    compute_score("openai/gsm8k", "it is 42", "42", method="flexible")            # 1.0

`strict` wants the mark and takes the last one; `flexible` takes the last number anywhere. Numbers are
compared as numbers: 1,000 and $1000.00 are equal.
"""

import re
from decimal import Decimal
from typing import Any, Literal

_NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)
_WINDOW = 1000
"""Only the end of a response is searched: answers stand there, and the time stays bounded."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> float:
    """1 if right, `format_score` if there is an answer in the form asked for but a wrong one, else 0."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}; choose strict or flexible")
    found = (_MARKED if method == "strict" else _ANY).findall(solution_str[-_WINDOW:])
    if not found:
        return 0.0
    truth = _ANY.findall(str(ground_truth))
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} has no number")
    return 1.0 if _value(found[-1]) == _value(truth[-1]) else format_score


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))
