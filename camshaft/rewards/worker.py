"""Worker process for reward functions: load a function and call it with each received sample or batch.

    python -m camshaft.rewards.worker        # started by pool.py; exchanges messages.py messages on stdin and stdout

User code has an empty stdin, and its stdout is redirected to stderr, so that it cannot corrupt the messages. A forked
child that returns to this module exits silently. User code runs in the main thread, where `signal` works. A second
thread reads the messages and detects the exit of the driver even during a call; it then kills this process and its
children.
"""

import asyncio
import contextlib
import importlib
import inspect
import math
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Sized
from types import TracebackType
from typing import Any

from camshaft import plugins
from camshaft.errors import CamshaftError
from camshaft.rewards import loading
from camshaft.rewards.loading import RewardFunction, load_function, title
from camshaft.rewards.messages import Answer, Loaded, Reply
from camshaft.stop import ignore_stop_signals
from camshaft.subprocesses import kill_own_group, pack, receive, send, unpack

ANSWER = "pred"
"""Entry of a dict result with the extracted answer; validation compares the answers to one prompt."""

_MAX_FLOAT32 = 3.4028234663852886e38
_TRACE_CHARACTERS = 2000
_MAX_PARTS = 256
"""Maximum number of further entries in a dict result; each becomes a metric."""
_LOADERS = (
    __file__, loading.__file__, plugins.__file__, "<frozen importlib",
    os.path.dirname(importlib.__file__), os.path.dirname(asyncio.__file__),
)  # fmt: skip
"""Files whose frames are removed from the start of a user's traceback."""
_FAREWELL_SECONDS = 1.0


def main() -> None:
    """Serve calls until the driver closes standard input."""
    ignore_stop_signals()
    inbox, outbox = _take_over_pipes()
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox, messages), daemon=True).start()
    spec = messages.get()
    if spec is None:
        return
    try:
        function = load_function(spec)
    except CamshaftError as error:
        _send(outbox, Loaded(str(error)))
        return
    except Exception as error:
        _send(outbox, Loaded(f"{title(spec)} could not be loaded:\n{_tail(error, _of_user(error))}"))
        return
    _send(outbox, Loaded(None, function.batched))
    loop, home = asyncio.new_event_loop(), os.getpid()
    while (calls := messages.get()) is not None:
        for samples in calls:
            answer = call(function, samples, spec.timeout, loop)
            if os.getpid() != home:
                os._exit(0)  # a forked child returned from the function; only the parent answers
            _send(outbox, answer)
    loop.close()


def call(function: RewardFunction, samples: list[bytes], timeout: float, loop: asyncio.AbstractEventLoop) -> Answer:
    """Call the user's function and convert its result or exception to an answer."""
    # The driver enforces the time limit. This alarm covers a driver that died while the function holds the
    # interpreter lock: its default action ends the process without running Python code.
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 10)
    began = time.perf_counter()
    try:
        result = function.call([pickle.loads(sample) for sample in samples])
        if inspect.isawaitable(result):
            result = loop.run_until_complete(_await_result(result))
        replies = _replies(result, len(samples)) if function.batched else [_reply(result)]
    except BaseException as error:  # includes SystemExit: `sys.exit` in a reward function fails that sample
        replies = [Reply("error", 0.0, {}, _one_line(error), _tail(error, _of_user(error)))]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Answer(replies, time.perf_counter() - began)


async def _await_result(result: Any) -> Any:
    return await result


def _replies(result: Any, num_samples: int) -> list[Reply]:
    """Return one reply per result of a batch, or a single one if the number of results is wrong."""
    if isinstance(result, (str, bytes, dict)) or not isinstance(result, Sized):
        return [_invalid(f"a batched function must return a list, but this one returned {_short(result)}")]
    results: list[Any] = list(result)  # pyright: ignore[reportArgumentType]
    if len(results) != num_samples:
        return [_invalid(f"the function returned {len(results)} results for {num_samples} samples")]
    return [_reply(one) for one in results]


def _reply(result: Any) -> Reply:
    parts: dict[str, float] = {}
    answer = None
    if isinstance(result, dict):
        if "score" not in result:
            return _invalid(f"the function returned a dict without 'score': {_short(result)}")
        answer = None if result.get(ANSWER) is None else _text(result[ANSWER]).strip() or None
        # Strings in the dict are ignored; only numbers can be averaged.
        numbers = {_text(name): _number(value) for name, value in result.items() if name not in ("score", ANSWER)}
        parts = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
        if len(parts) > _MAX_PARTS:
            return _invalid(f"the dict has {len(parts)} numbers besides the score; the maximum is {_MAX_PARTS}")
        result = result["score"]
    score = _number(result)
    if score is None:
        return _invalid(f"the score is not a number: {_short(result)}")
    if not abs(score) <= _MAX_FLOAT32:
        return _invalid(f"the score is not finite: {_short(result)}")
    return Reply("ok", score, parts, answer=answer)


def _invalid(message: str) -> Reply:
    return Reply("invalid", 0.0, {}, message)


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.inf


def _text(value: Any) -> str:
    """Convert to a string that can be encoded in UTF-8: lone surrogates are escaped."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def _short(value: Any) -> str:
    text = _text(repr(value))
    return text if len(text) <= 200 else text[:200] + "..."


def _of_user(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of user code on; None for a syntax error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_LOADERS):
        trace = trace.tb_next
    return trace


def _one_line(error: BaseException) -> str:
    return _text("".join(traceback.format_exception_only(error))).strip()[-500:]


def _tail(error: BaseException, trace: TracebackType | None) -> str:
    """Format the end of the traceback, from the first user frame on."""
    return _text("".join(traceback.format_exception(type(error), error, trace)))[-_TRACE_CHARACTERS:].strip()


def _take_over_pipes() -> tuple[int, int]:
    inbox, outbox = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return inbox, outbox


def _read(inbox: int, messages: "queue.SimpleQueue[Any]") -> None:
    with contextlib.suppress(BrokenPipeError):
        while True:
            messages.put(unpack(receive(inbox)))
    messages.put(None)
    time.sleep(_FAREWELL_SECONDS)
    # The main thread is still in a call. If the pool started this process, the process group contains only it and
    # its children.
    if os.getpgrp() == os.getpid():
        kill_own_group()
    os._exit(1)


def _send(outbox: int, message: Any) -> None:
    try:
        send(outbox, pack(message))
    except BrokenPipeError:
        os._exit(0)  # the driver exited


if __name__ == "__main__":
    main()
