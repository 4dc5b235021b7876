"""Process that hosts environments: load them, and make the calls that the pool sends.

`camshaft.workers` starts it and exchanges the messages; `messages.py` describes their contents.
"""

import pickle
import signal
import traceback
from collections.abc import Coroutine
from typing import Any

from camshaft.agents.environment import Fault, Host, Judge, Turn
from camshaft.agents.messages import Call, Loaded, Reply, Scoring, Spec, describe, load_environments
from camshaft.errors import CamshaftError
from camshaft.masking import mask_text, remember_secrets
from camshaft.rewards.loading import load_functions
from camshaft.subprocesses import extend_import_path
from camshaft.workers.child import Parent, event_loop

_TRACE_CHARACTERS = 2000


def main(stack_file: str) -> None:
    """Serve calls until the pool closes standard input. Write stacks to the descriptor `stack_file` on request."""
    parent = Parent(int(stack_file))
    spec: Spec | None = parent.get()
    if spec is None:
        return
    remember_secrets([spec.kwargs])
    try:
        extend_import_path(spec.sys_path)
        factories, functions = load_environments(spec, pickle.loads)  # from the pipe of the pool, never from a file
        loaded = Loaded(None) if spec.is_described else describe(factories, functions, spec.kwargs)
        judge = None if spec.rewards is None else Judge(load_functions(spec.rewards), spec.rewards)
    except CamshaftError as error:
        parent.ready(Loaded(_printable(str(error))))
        return
    except BaseException as error:
        rewards = () if spec.rewards is None else [function.text for function in spec.rewards.functions]
        names = ", ".join([*(source.target for source in spec.sources), *rewards])
        parent.ready(Loaded(f"{names} could not be loaded:\n{_trace(error)}"))
        return
    host = Host(factories, spec.kwargs, _wait, functions, not spec.is_scored_elsewhere, judge)
    parent.ready(loaded)
    parent.serve(lambda call: host.run(make_calls(host, call)), lambda call: make_calls(host, call, spec))


async def make_calls(host: Host, call: Call, limits: Spec | None = None) -> list[Turn | Fault]:
    """Make the calls of an environment up to the first that fails. Return one result for each.

    `limits` has the time limits of the calls. Without it, the pool ends this process.
    """
    turns: list[Turn | Fault] = []
    number = call.episode
    try:
        if call.start is not None:
            start = pickle.loads(call.start)
            turns.append(await _limited(host.begin(number, start), limits and limits.start_timeout))
        for answer in call.answers:
            turns.append(await _limited(_reply(host, number, answer), limits and limits.limit(answer)))
    except _Expired as expired:
        host.discard(number)
        turns.append(Fault("timeout", str(expired)))
    except BaseException as error:  # includes SystemExit, so that `sys.exit` fails only its episode
        host.discard(number)
        turns.append(fault_of(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm of the environment must not interrupt the next call
    if not call.answers and call.start is None:
        host.end([number])
    return turns


def _reply(host: Host, number: int, answer: Reply) -> Coroutine[Any, Any, Turn]:
    if answer is None:
        return host.read_score(number)
    if isinstance(answer, Scoring):
        return host.call_reward(number, answer.function, pickle.loads(answer.sample))
    return host.reply(number, answer)


def fault_of(error: BaseException) -> Fault:
    """Describe an exception of user code."""
    is_ours = isinstance(error, CamshaftError)
    text = str(error) if is_ours else "".join(traceback.format_exception_only(error)).strip()
    return Fault("error", _printable(text[-500:]), "" if is_ours else _trace(error))


class _Expired(Exception):
    """A call has exceeded its time limit."""


async def _limited(calling: Coroutine[Any, Any, Turn], seconds: float | None) -> Turn:
    if seconds is None:
        return await calling
    import asyncio

    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            turn = await calling
    except TimeoutError:
        if not limit.expired():
            raise
    else:
        if not limit.expired():  # the call may have suppressed the cancellation
            return turn
    raise _Expired(f"no result within {seconds:g} s; the call was cancelled")


def _wait(call: Coroutine[Any, Any, Any]) -> Any:
    return event_loop().run_until_complete(call)


def _trace(error: BaseException) -> str:
    """Format the traceback from the first frame of user code on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "camshaft":
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    return _printable(text)[-_TRACE_CHARACTERS:].strip()


def _printable(text: str) -> str:
    return mask_text(text.encode("utf-8", "backslashreplace").decode())
