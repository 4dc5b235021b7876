r"""Mathematics in general: the answer is an expression, compared as one by the `math-verify` package.

    compute_score("HuggingFaceH4/MATH-500", r"so \boxed{\frac12}", "0.5")    # {"score": 1.0, "pred": r"\frac{1}{2}"}
    compute_score("aime_2024", "the answer is $204$", "204")    # {"score": 1.0, "pred": "204"}
    compute_score("aime_2024", "the answer is $204$", "204", method="strict")    # {"score": 0.0, "pred": None}

The answer is in the last \boxed{}. Where there is none, `flexible` takes what the package finds, `strict` nothing. The
ground truth is the answer in LaTeX, or a whole solution with a \boxed{} in it. Needs `pip install 'camshaft[math]'`.

A response that takes longer than `seconds` to read, or to compare, is wrong and no failure: a policy can write
9^{9^{9^{9}}}. The package's own limits are alarms in this process, of whole seconds; what they cannot interrupt meets
the limit of every reward.
"""

import logging
from functools import lru_cache
from typing import Any, Literal

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_BOX = "\\boxed"
_IN_A_BOX = (LatexExtractionConfig(boxed_match_priority=0),)
_ANYWHERE = (*_IN_A_BOX, ExprExtractionConfig())
_WINDOW = 3000
"""Only the end of a response is searched: answers stand there, and the time stays bounded."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it tells of each text that it cannot read


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    method: Literal["strict", "flexible"] = "flexible",
    seconds: int = 5,
) -> dict[str, Any]:
    """1 if the expressions are equal, else 0; and the answer in the LaTeX that the package makes of it."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r}; choose strict or flexible")
    truth, end = _truth(str(ground_truth), seconds), _last_box(solution_str[-_WINDOW:])
    boxed = end.startswith(_BOX)
    found: list[Any] = []
    if boxed or method == "flexible":
        found = parse(end, _IN_A_BOX if boxed else _ANYWHERE, parsing_timeout=seconds)
    if not found:
        return {"score": 0.0, "pred": None}
    right = verify(truth, found, timeout_seconds=seconds)
    return {"score": float(right), "pred": next((one for one in found if isinstance(one, str)), None)}


@lru_cache(maxsize=4096)
def _truth(text: str, seconds: int) -> list[Any]:
    """What the ground truth may be read as."""
    boxed = _last_box(text) if _BOX in text else f"{_BOX}{{{text}}}"
    found = parse(boxed, _IN_A_BOX, parsing_timeout=seconds)
    if not found:
        raise ValueError(f"the ground truth {text!r} is no mathematics that math-verify can read")
    return found


def _last_box(text: str) -> str:
    """From the last box on; all of it where there is none."""
    return text[max(text.rfind(_BOX), 0) :]
