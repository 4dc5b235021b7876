r"""Math reward: compare the answer with the ground truth by the `math-verify` package.

    compute_score("HuggingFaceH4/MATH-500", r"so \boxed{\frac12}", "0.5")    # {"score": 1.0, "pred": r"\frac{1}{2}"}
    compute_score("aime_2024", "the answer is $204$", "204")    # {"score": 1.0, "pred": "204"}
    compute_score("aime_2024", "the answer is $204$", "204", method="strict")    # {"score": 0.0, "pred": None}

The answer is the content of the last \boxed{} of the response. If there is none, `method="flexible"` uses the
expression that math-verify extracts from the text, and `method="strict"` gives score 0. The ground truth is the answer
in LaTeX, or a solution with a \boxed{}. This function requires `pip install 'camshaft[math]'`.

If an answer takes longer than `seconds` to parse or compare, the response scores 0. This does not count as a failure of
the reward function, because a policy can write 9^{9^{9^{9}}}. math-verify enforces the limit with alarms in whole
seconds. Code that alarms cannot interrupt is ended by the time limit of all reward calls.
"""

import logging
from functools import lru_cache
from typing import Any, Literal

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_BOX = "\\boxed"
_BOXED = (LatexExtractionConfig(boxed_match_priority=0),)
_ANYWHERE = (*_BOXED, ExprExtractionConfig())
_WINDOW = 3000
"""Number of characters at the end of a response that are searched. It bounds the search time."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # math_verify logs every text that it cannot parse


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    method: Literal["strict", "flexible"] = "flexible",
    seconds: int = 5,
) -> dict[str, Any]:
    """Return score 1 if the expressions are equal, otherwise 0; `pred` is the answer as LaTeX of math-verify."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}; use strict or flexible")
    truth, end = _parse_truth(str(ground_truth), seconds), _last_box(solution_str[-_WINDOW:])
    boxed = end.startswith(_BOX)
    answers: list[Any] = []
    if boxed or method == "flexible":
        answers = parse(end, _BOXED if boxed else _ANYWHERE, parsing_timeout=seconds)
    if not answers:
        return {"score": 0.0, "pred": None}
    correct = verify(truth, answers, timeout_seconds=seconds)
    return {"score": float(correct), "pred": next((answer for answer in answers if isinstance(answer, str)), None)}


@lru_cache(maxsize=4096)
def _parse_truth(text: str, seconds: int) -> list[Any]:
    """Parse the ground truth into expressions of math-verify."""
    boxed = _last_box(text) if _BOX in text else f"{_BOX}{{{text}}}"
    expressions = parse(boxed, _BOXED, parsing_timeout=seconds)
    if not expressions:
        raise ValueError(f"math-verify cannot parse the ground truth {text!r}; provide a LaTeX expression")
    return expressions


def _last_box(text: str) -> str:
    """Return the text from the last \\boxed to the end, or the whole text if it contains none."""
    return text[max(text.rfind(_BOX), 0) :]
