"""GSM8K reward: compare the number after `####` with the ground truth.

    compute_score("openai/gsm8k", "6 * 7 = 42\\n#### 42", "42")             # {"score": 1.0, "pred": "42"}
    compute_score("openai/gsm8k", "it is 42", "42")                        # {"score": 0.0, "pred": None}
    compute_score("openai/gsm8k", "it is 42", "42", method="flexible")     # {"score": 1.0, "pred": "42"}

`method="strict"` reads the last number that follows `####`, `method="flexible"` the last number of the response.
Numbers are compared by value, so 1,000 and $1000.00 are equal.
"""

import re
from decimal import Decimal
from typing import Any, Literal

_NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)
_WINDOW = 1000
"""Number of characters at the end of a response that are searched. It bounds the search time."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Return score 1 for the correct number, `format_score` for any other number, and 0 without a number."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}; use strict or flexible")
    numbers = (_MARKED if method == "strict" else _ANY).findall(solution_str[-_WINDOW:])
    if not numbers:
        return {"score": 0.0, "pred": None}
    truth = _ANY.findall(str(ground_truth))
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} contains no number; correct the data")
    answer = _parse_number(numbers[-1])
    score = 1.0 if answer == _parse_number(truth[-1]) else format_score
    return {"score": score, "pred": _format_number(answer)}


def _parse_number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))


def _format_number(value: Decimal) -> str:
    """Format a number such that equal numbers give equal strings."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if value == 0 else text
