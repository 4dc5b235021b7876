"""GSM8K reward: the answer is the number after `####`.

    compute_score("openai/gsm8k", "6 * 7 = 42\\n#### 42", "42")             # {"score": 1.0, "pred": "42"}
    compute_score("openai/gsm8k", "it is 42", "42")                        # {"score": 0.0, "pred": None}
    compute_score("openai/gsm8k", "it is 42", "42", method="flexible")     # {"score": 1.0, "pred": "42"}

`strict` reads the number after the last `####`; `flexible` reads the last number of the response. Numbers are compared
by value: 1,000 and $1000.00 are equal.
"""

import re
from decimal import Decimal
from typing import Any, Literal

_NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)
_WINDOW = 1000
"""Characters at the end of a response that are searched, which bounds the time."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Score 1 for the correct number, `format_score` for another number, and 0 without a number."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}; use strict or flexible")
    numbers = (_MARKED if method == "strict" else _ANY).findall(solution_str[-_WINDOW:])
    if not numbers:
        return {"score": 0.0, "pred": None}
    truth = _ANY.findall(str(ground_truth))
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} has no number")
    answer = _value(numbers[-1])
    score = 1.0 if answer == _value(truth[-1]) else format_score
    return {"score": score, "pred": _plain(answer)}


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))


def _plain(value: Decimal) -> str:
    """Format equal numbers as equal strings."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if value == 0 else text
