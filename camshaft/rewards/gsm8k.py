"""Grade-school mathematics: the answer is the number after `####`.

    compute_score("openai/gsm8k", "6 * 7 = 42\\n#### 42", "42")             # {"score": 1.0, "pred": "42"}
    compute_score("openai/gsm8k", "it is 42", "42")                        # {"score": 0.0, "pred": None}
    compute_score("openai/gsm8k", "it is 42", "42", method="flexible")     # {"score": 1.0, "pred": "42"}

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
) -> dict[str, Any]:
    """1 if right, `format_score` for a wrong answer in the form asked for, 0 where there is none; and the answer."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}; choose strict or flexible")
    found = (_MARKED if method == "strict" else _ANY).findall(solution_str[-_WINDOW:])
    if not found:
        return {"score": 0.0, "pred": None}
    truth = _ANY.findall(str(ground_truth))
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} has no number")
    answer = _value(found[-1])
    score = 1.0 if answer == _value(truth[-1]) else format_score
    return {"score": score, "pred": _plain(answer)}


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))


def _plain(value: Decimal) -> str:
    """Equal numbers as equal texts."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if value == 0 else text
