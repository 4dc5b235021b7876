"""What runs in a reward process: load one function, call it for each sample that arrives.

    python -m camshaft.rewards.worker        # started by pool.py; speaks wire.py on stdin and stdout

The user's code gets standard error for its prints and an empty standard input, so it cannot disturb the
messages. It runs in the main thread, where `signal` works. A second thread reads the messages and so
notices, even in mid-call, that the driver is gone; then this process and its children end.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from camshaft.errors import CamshaftError
from camshaft.plugins import find, import_attribute, names
from camshaft.rewards import GROUP, REWARDS
from camshaft.rewards.wire import FrameReader, Loaded, Reply, Sample, Spec, pack
from camshaft.stop import outlive_stop_signals

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
ANSWER = "pred"
"""The entry of a dict result that says what the response answers: those to one prompt are held against each other."""

_MAX_FLOAT32 = 3.4028234663852886e38
_TRACE_CHARACTERS = 2000
_LOADERS = (__file__, "<frozen importlib", str(Path(importlib.__file__).parent))
"""Where the frames of a traceback are that a user has no use for."""
_FAREWELL_SECONDS = 1.0


def main() -> None:
    """Serve until the driver closes our standard input."""
    outlive_stop_signals()
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
        _send(outbox, Loaded(f"{_named(spec)} could not be loaded:\n{_tail(error, _of_user(error))}"))
        return
    _send(outbox, Loaded(None))
    loop = asyncio.new_event_loop()
    while (samples := messages.get()) is not None:
        for sample in samples:
            _send(outbox, call(function, sample, spec, loop))
    loop.close()


def load_function(spec: Spec) -> Callable[..., Any]:
    """The function that `spec` names; an error says what is there instead."""
    sys.path.extend(entry for entry in spec.sys_path if entry not in sys.path)
    if spec.path is None:
        target = find(spec.name, REWARDS, GROUP)
        if target is None:
            known = ", ".join(names(REWARDS, GROUP))
            raise CamshaftError(
                f"there is no reward function '{spec.name}'; known: {known}. A function of your own is given by the "
                "path of its file and its name"
            )
        function = import_attribute(target)
    else:
        function = _attribute(_module(spec.path), spec)
    if not callable(function):
        raise CamshaftError(f"{_named(spec)} is a {type(function).__name__}, not a function")
    _check_signature(function, spec)
    return function


def _module(path: str) -> ModuleType:
    file = Path(path).expanduser()
    if file.suffix != ".py" and not file.exists() and "/" not in path:
        return importlib.import_module(path)
    if not file.is_file():
        raise CamshaftError(f"there is no reward file {file} (looked from {os.getcwd()})")
    sys.path.insert(0, str(file.resolve().parent))  # so that the file can import its neighbours
    name = f"camshaft_reward_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise CamshaftError(f"{file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look classes up here
    found.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, spec: Spec) -> Any:
    if spec.name in vars(module):
        return vars(module)[spec.name]
    there = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    raise CamshaftError(f"{spec.path} has no '{spec.name}'; its functions: {', '.join(there) or 'none'}")


def _check_signature(function: Callable[..., Any], spec: Spec) -> None:
    taken = sorted(set(ARGUMENTS) & spec.kwargs.keys())
    if taken:
        raise CamshaftError(f"reward_kwargs gives {taken}, which come from the data")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a function written in C does not tell
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **spec.kwargs)
    except TypeError as error:
        extra = f" and reward_kwargs {sorted(spec.kwargs)}" if spec.kwargs else ""
        raise CamshaftError(
            f"{_named(spec)}{signature} cannot be called with {', '.join(ARGUMENTS)}{extra}: {error}"
        ) from error


def _named(spec: Spec) -> str:
    return f"{spec.path}:{spec.name}" if spec.path else spec.name


def call(function: Callable[..., Any], sample: bytes, spec: Spec, loop: asyncio.AbstractEventLoop) -> Reply:
    """One call of the user's function, whatever it does."""
    # The driver enforces the limit. This alarm is for a driver that has died while the function holds the
    # interpreter lock: it needs no Python to run, and ends the process.
    signal.setitimer(signal.ITIMER_REAL, 2 * spec.timeout + 10)
    try:
        result = function(**Sample.unpacked(sample)._asdict(), **spec.kwargs)
        if inspect.isawaitable(result):
            result = loop.run_until_complete(_awaited(result))
        return _reply(result)
    except BaseException as error:  # SystemExit too: `sys.exit` in a reward is that sample's failure
        own = error.__traceback__.tb_next if error.__traceback__ else None
        return Reply("error", 0.0, {}, _one_line(error), _tail(error, own))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


async def _awaited(result: Any) -> Any:
    return await result


def _reply(result: Any) -> Reply:
    parts: dict[str, float] = {}
    answer = None
    if isinstance(result, dict):
        if "score" not in result:
            return Reply("invalid", 0.0, {}, f"the function returned a dict without 'score': {_short(result)}")
        answer = None if result.get(ANSWER) is None else str(result[ANSWER]).strip() or None
        # Texts in the dict are for the user's own records; only numbers can be averaged.
        numbers = {str(name): _number(value) for name, value in result.items() if name not in ("score", ANSWER)}
        parts = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
        result = result["score"]
    score = _number(result)
    if score is None:
        return Reply("invalid", 0.0, {}, f"the score is not a number: {_short(result)}")
    if not abs(score) <= _MAX_FLOAT32:
        return Reply("invalid", 0.0, {}, f"the score is not finite: {_short(result)}")
    return Reply("ok", score, parts, answer=answer)


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _of_user(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame that is neither ours nor the import system's; a syntax error has none."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_LOADERS):
        trace = trace.tb_next
    return trace


def _one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[-500:]


def _tail(error: BaseException, trace: TracebackType | None) -> str:
    """The end of the traceback, from the user's first frame on."""
    return "".join(traceback.format_exception(type(error), error, trace))[-_TRACE_CHARACTERS:].strip()


def _take_over_pipes() -> tuple[int, int]:
    inbox, outbox = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return inbox, outbox


def _read(inbox: int, messages: "queue.SimpleQueue[Any]") -> None:
    frames = FrameReader()
    while data := os.read(inbox, 1 << 16):
        for message in frames.feed(data):
            messages.put(message)
    messages.put(None)
    time.sleep(_FAREWELL_SECONDS)
    # Still alive: the main thread is in mid-call. The group is ours alone if the pool started us.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _send(outbox: int, message: Any) -> None:
    data = memoryview(pack(message))
    try:
        while data:
            data = data[os.write(outbox, data) :]
    except BrokenPipeError:
        os._exit(0)  # nobody listens any more


if __name__ == "__main__":
    main()
