"""Worker process for reward functions: load the function and call it with the samples that the pool sends.

    python -m camshaft.rewards.worker STACK_FILE        # a file descriptor

The pool (`pool.py`) starts it, and exchanges messages (`messages.py`) through stdin and stdout. For user code, stdin is
empty and stdout is redirected to stderr, so that user code cannot corrupt the messages; the pool reads stderr. If user
code forks and the child returns to this module, the child exits silently. User code runs in the main thread, where
signal handlers can be set. A second thread reads the messages. If the driver exits during a call, this thread kills the
process and its children.
"""

import contextlib
import functools
import importlib
import inspect
import math
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any

from camshaft import plugins
from camshaft.errors import CamshaftError
from camshaft.masking import mask_text, secret_values
from camshaft.rewards import loading
from camshaft.rewards.loading import RewardFunction, function_name, load_function
from camshaft.rewards.messages import CallResult, LoadResult, Reply, Spec
from camshaft.stacks import dump_stacks_on_signal
from camshaft.stop import ignore_stop_signals
from camshaft.subprocesses import kill_own_group, pack, receive, send, unpack

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

ANSWER = "pred"
"""Key of a dict result for the extracted answer. Validation compares the answers to the same prompt."""

_TRACE_CHARACTERS = 2000
_MAX_PARTS = 256
"""Maximum number of entries besides `score` and `pred` in a dict result, each of which becomes a metric."""
_LOADERS = (
    __file__, loading.__file__, plugins.__file__, "<frozen importlib",
    os.path.dirname(importlib.__file__), os.path.join(os.path.dirname(os.__file__), "asyncio"),
)  # fmt: skip
"""Files whose frames are removed from the start of a traceback of user code."""
_EXIT_DELAY_SECONDS = 1.0
_secrets: list[str] = []
"""Values that must not appear in the messages of this process."""


def main(stack_file: int) -> None:
    """Serve calls until the driver closes standard input. Write stacks to the descriptor `stack_file` on request."""
    ignore_stop_signals()
    dump_stacks_on_signal(stack_file)
    inbox, outbox = _redirect_pipes()
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(inbox, messages), daemon=True).start()
    spec = messages.get()
    if spec is None:
        return
    _secrets[:] = secret_values(os.environ, spec.kwargs)
    try:
        function = load_function(spec)
    except CamshaftError as error:
        _send(outbox, LoadResult(_to_message(error)))
        return
    except Exception as error:
        _send(outbox, LoadResult(f"{function_name(spec)} could not be loaded:\n{_format_traceback(error)}"))
        return
    arguments = function.arguments
    _send(outbox, LoadResult(None, arguments.batched, arguments.columns, arguments.required))
    pid = os.getpid()
    while (calls := messages.get()) is not None:
        for samples in calls:
            result = call(function, samples, spec)
            if os.getpid() != pid:
                os._exit(0)  # this is a forked child that returned from the function; only the parent sends results
            _send(outbox, result)


def call(function: RewardFunction, samples: list[bytes], spec: Spec) -> CallResult:
    """Call the reward function and convert its result or exception to replies."""
    # The driver enforces the time limit. If the driver died and the function holds the interpreter lock, only this
    # alarm ends the process: its default action does not run Python code.
    signal.setitimer(signal.ITIMER_REAL, 2 * spec.timeout + 10)
    start = time.perf_counter()
    try:
        result = function.call([pickle.loads(sample) for sample in samples])
        if inspect.isawaitable(result):
            result = _event_loop().run_until_complete(_await_result(result))
        limit = spec.max_abs_score
        replies = _replies(result, len(samples), limit) if function.arguments.batched else [_reply(result, limit)]
    except BaseException as error:  # includes SystemExit, so `sys.exit` in a reward function fails only its sample
        replies = [Reply("error", 0.0, {}, _format_message(error), _format_traceback(error))]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return CallResult(replies, time.perf_counter() - start)


@functools.cache
def _event_loop() -> "AbstractEventLoop":
    """Return the event loop of this process. The import takes half of the start of a worker."""
    import asyncio

    return asyncio.new_event_loop()


async def _await_result(result: Any) -> Any:
    return await result


def _replies(result: Any, num_samples: int, max_abs_score: float) -> list[Reply]:
    """Return one reply for each result of a batch, or a single reply if the batch result is invalid."""
    if isinstance(result, (str, bytes, dict)) or not isinstance(result, Sized):
        return [_invalid(f"the batched function returned {_abbreviate(result)}; it must return a list")]
    results: list[Any] = list(result)  # pyright: ignore[reportArgumentType]
    if len(results) != num_samples:
        return [
            _invalid(
                f"the function returned {len(results)} results for {num_samples} samples; it must return one per sample"
            )
        ]
    return [_reply(item, max_abs_score) for item in results]


def _reply(result: Any, max_abs_score: float) -> Reply:
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
    score = _to_float(result)
    if score is None:
        return _invalid(f"the score is not a number: {_abbreviate(result)}")
    if not math.isfinite(score):
        return _invalid(f"the score is not finite: {_abbreviate(result)}")
    if abs(score) > max_abs_score:
        limit = f"custom_reward_function.max_abs_score={max_abs_score:g}"
        return _invalid(f"the score {_abbreviate(result)} exceeds {limit}")
    return Reply("ok", score, parts, answer=answer)


def _invalid(message: str) -> Reply:
    return Reply("invalid", 0.0, {}, message)


def _to_float(value: Any) -> float | None:
    if value is None or isinstance(value, (str, bytes, bytearray)):
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


def _to_message(value: Any) -> str:
    """Convert to a string for logs and files, in which secrets of the environment and the config are masked."""
    return mask_text(_to_text(value), _secrets)


def _abbreviate(value: Any) -> str:
    text = _to_message(repr(value))
    return text if len(text) <= 200 else text[:200] + "..."


def _user_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of user code on. Return None if user code did not run."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_LOADERS):
        trace = trace.tb_next
    return trace


def _format_message(error: BaseException) -> str:
    return _to_message("".join(traceback.format_exception_only(error))).strip()[-500:]


def _format_traceback(error: BaseException) -> str:
    """Format the traceback from the first frame of user code on, and return its last characters."""
    lines = traceback.format_exception(type(error), error, _user_traceback(error))
    return _to_message("".join(lines))[-_TRACE_CHARACTERS:].strip()


def _redirect_pipes() -> tuple[int, int]:
    inbox, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return inbox, outbox


def _read_messages(inbox: int, messages: "queue.SimpleQueue[Any]") -> None:
    with contextlib.suppress(BrokenPipeError):
        while True:
            messages.put(unpack(receive(inbox)))
    messages.put(None)
    time.sleep(_EXIT_DELAY_SECONDS)
    # The main thread is still running a call. If the pool started this process, the process group contains only this
    # process and its children.
    if os.getpgrp() == os.getpid():
        kill_own_group()
    os._exit(1)


def _send(outbox: int, message: Any) -> None:
    try:
        send(outbox, pack(message))
    except BrokenPipeError:
        os._exit(0)  # the driver has exited


if __name__ == "__main__":
    main(int(sys.argv[1]))
