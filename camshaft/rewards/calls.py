"""Call reward functions in a worker process, and convert their results and exceptions to outcomes.

    outcomes = call(function, samples, spec)                # a function, or a batched function
    outcomes = await call_async(function, samples, spec)    # a coroutine function, whose calls can run at a time

Only `worker.py` uses this module.
"""

import importlib
import inspect
import math
import os
import pickle
import signal
import traceback
from collections.abc import Sized
from typing import Any

from camshaft import plugins, workers
from camshaft.masking import mask_text
from camshaft.rewards import loading
from camshaft.rewards.loading import RewardFunction
from camshaft.rewards.messages import Outcome, Samples, Spec
from camshaft.workers.child import event_loop

ANSWER = "pred"
"""Key of a dict result for the extracted answer. Validation compares the answers to the same prompt."""

_TRACE_CHARACTERS = 2000
_MAX_PARTS = 256
"""Maximum number of entries besides `score` and `pred` in a dict result, each of which becomes a metric."""
_LOADERS = (
    __file__, os.path.join(os.path.dirname(__file__), "worker.py"), loading.__file__, plugins.__file__,
    *workers.__path__, "<frozen importlib",
    os.path.dirname(importlib.__file__), os.path.join(os.path.dirname(os.__file__), "asyncio"),
)  # fmt: skip
"""Files whose frames are removed from the start of a traceback of user code."""


def call(function: RewardFunction, samples: Samples, spec: Spec) -> list[Outcome]:
    """Call a reward function and return its outcomes."""
    try:
        result = function.call(_unpickle(samples))
        if inspect.isawaitable(result):
            result = event_loop().run_until_complete(_await_result(result))
        limit = spec.max_abs_score
        batched, num_samples = function.arguments.batched, len(samples.samples)
        return _outcomes(result, num_samples, limit) if batched else [_outcome(result, limit)]
    except BaseException as error:  # includes SystemExit, so `sys.exit` in a reward function fails only its sample
        return [failed(error)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the function has set must not interrupt the next call


async def call_async(function: RewardFunction, samples: Samples, spec: Spec) -> list[Outcome]:
    """Call a coroutine function and return its outcome."""
    try:
        return [_outcome(await function.call(_unpickle(samples)), spec.max_abs_score)]
    except BaseException as error:
        return [failed(error)]


def _unpickle(samples: Samples) -> list[Any]:
    return [pickle.loads(sample) for sample in samples.samples]


def episode_outcome(function: RewardFunction, result: Any, spec: Spec) -> Outcome:
    """Return the outcome of a function that was called for one episode."""
    if function.arguments.batched:
        return _outcomes(result, 1, spec.max_abs_score)[0]
    return _outcome(result, spec.max_abs_score)


async def _await_result(result: Any) -> Any:
    return await result


def _outcomes(result: Any, num_samples: int, max_abs_score: float) -> list[Outcome]:
    """Return one outcome for each result of a batch, or a single outcome if the batch result is invalid."""
    if isinstance(result, (str, bytes, dict)) or not isinstance(result, Sized):
        return [_invalid(f"the batched function returned {_abbreviate(result)}; it must return a list")]
    results: list[Any] = list(result)  # pyright: ignore[reportArgumentType]
    if len(results) != num_samples:
        counts = f"{len(results)} results for {num_samples} samples"
        return [_invalid(f"the function returned {counts}; it must return one per sample")]
    return [_outcome(item, max_abs_score) for item in results]


def _outcome(result: Any, max_abs_score: float) -> Outcome:
    parts: dict[str, float] = {}
    answer = None
    if isinstance(result, dict):
        if "score" not in result:
            return _invalid(f"the function returned a dict without 'score': {_abbreviate(result)}")
        answer = None if result.get(ANSWER) is None else _to_text(result[ANSWER]).strip() or None
        # Values that are not finite numbers are ignored, because they cannot be averaged.
        values = {_to_text(name): _to_float(value) for name, value in result.items() if name not in ("score", ANSWER)}
        parts = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        if len(parts) > _MAX_PARTS:
            return _invalid(f"the dict has {len(parts)} numbers besides the score; return at most {_MAX_PARTS}")
        result = result["score"]
    if result is None:
        return Outcome("unscored", message="the function returned None", answer=answer)
    score = _to_float(result)
    if score is None:
        return _invalid(f"the score is not a number: {_abbreviate(result)}")
    if not math.isfinite(score):
        return _invalid(f"the score is not finite: {_abbreviate(result)}")
    if abs(score) > max_abs_score:
        limit = f"custom_reward_function.max_abs_score={max_abs_score:g}"
        return _invalid(f"the score {_abbreviate(result)} exceeds {limit}")
    return Outcome("ok", score, parts, answer=answer)


def _invalid(message: str) -> Outcome:
    return Outcome("invalid", message=message)


def failed(error: BaseException) -> Outcome:
    """Return the outcome of a call that has raised an exception."""
    message = to_message("".join(traceback.format_exception_only(error))).strip()[-500:]
    return Outcome("error", message=message, trace=format_traceback(error))


def _to_float(value: Any) -> float | None:
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.inf


def _to_text(value: Any) -> str:
    """Convert to a string that can be encoded in UTF-8, with lone surrogates escaped."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def to_message(value: Any) -> str:
    """Convert to a string for logs and files, in which secrets of the environment and the config are masked."""
    return mask_text(_to_text(value))


def _abbreviate(value: Any) -> str:
    text = to_message(repr(value))
    return text if len(text) <= 200 else text[:200] + "..."


def format_traceback(error: BaseException) -> str:
    """Format the traceback from the first frame of user code on, and return its last characters.

    If user code did not run, format only the exception.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_LOADERS):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    return to_message("".join(lines))[-_TRACE_CHARACTERS:].strip()
