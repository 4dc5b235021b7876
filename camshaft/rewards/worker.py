"""Worker process for reward functions: load the functions and call them with the samples that the pool sends.

    python -m camshaft.rewards.worker STACK_FILE        # a file descriptor

The pool (`pool.py`) starts it, and exchanges messages (`messages.py`) through stdin and stdout. For user code, stdin is
empty and stdout is redirected to stderr, so that user code cannot corrupt the messages; the pool reads stderr. A child
that user code forks exits silently if it returns to this module. User code runs in the main thread, where signal
handlers can be set. A second thread reads the messages. It kills the process group if the driver exits during a call.
"""

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from camshaft.errors import CamshaftError
from camshaft.masking import remember_secrets
from camshaft.rewards.calls import call, call_concurrently, event_loop, format_traceback, to_message
from camshaft.rewards.loading import RewardFunction, load_functions
from camshaft.rewards.messages import CallResult, LoadResult, Request, Spec
from camshaft.stacks import dump_stacks_on_signal
from camshaft.stop import ignore_stop_signals
from camshaft.subprocesses import kill_own_group, pack, receive, send, unpack

_EXIT_DELAY_SECONDS = 1.0


class Inbox:
    """Messages from the pool, which a thread adds. The main thread waits for them with or without an event loop."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._notify: Callable[[], object] = lambda: None

    def put(self, message: Any) -> None:
        self._messages.put(message)
        self._notify()

    def get(self) -> Any:
        """Wait for the next message."""
        return self._messages.get()

    async def get_async(self) -> Any:
        """Wait for the next message while the tasks of the event loop run."""
        import asyncio

        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._notify = lambda: loop.call_soon_threadsafe(arrived.set)
        while self._messages.empty():
            await arrived.wait()
            arrived.clear()
        self._notify = lambda: None
        return self._messages.get()


def main(stack_file: int) -> None:
    """Serve calls until the driver closes standard input. Write stacks to the descriptor `stack_file` on request."""
    ignore_stop_signals()
    dump_stacks_on_signal(stack_file)
    pipe, outbox = _redirect_pipes()
    inbox = Inbox()
    threading.Thread(target=_read_messages, args=(pipe, inbox), daemon=True).start()
    spec: Spec | None = inbox.get()
    if spec is None:
        return
    remember_secrets(*(function.kwargs for function in spec.functions))
    try:
        functions = load_functions(spec)
    except CamshaftError as error:
        _send(outbox, LoadResult(to_message(error)))
        return
    except Exception as error:
        names = ", ".join(function.text for function in spec.functions)
        _send(outbox, LoadResult(f"{names} could not be loaded:\n{format_traceback(error)}"))
        return
    _send(outbox, LoadResult(None, tuple(function.info for function in functions)))
    _serve(functions, spec, inbox, outbox)


def _serve(functions: Sequence[RewardFunction], spec: Spec, inbox: Inbox, outbox: int) -> None:
    pid = os.getpid()

    def reply(result: CallResult) -> None:
        if os.getpid() != pid:
            os._exit(0)  # this is a forked child that returned from the function; only the parent sends results
        _send(outbox, result)

    requests: list[Request] | None = inbox.get()
    while requests is not None:
        if functions[requests[0].function].info.concurrent:
            run = call_concurrently(functions, requests, spec, inbox.get_async, reply)
            requests = event_loop().run_until_complete(run)
            continue
        for request in requests:
            reply(call(functions[request.function], request, spec))
        requests = inbox.get()


def _redirect_pipes() -> tuple[int, int]:
    pipe, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return pipe, outbox


def _read_messages(pipe: int, inbox: Inbox) -> None:
    with contextlib.suppress(BrokenPipeError):
        while True:
            inbox.put(unpack(receive(pipe)))
    inbox.put(None)
    time.sleep(_EXIT_DELAY_SECONDS)
    # The main thread still runs a call. If the pool started this process, its group contains only it and its children.
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
