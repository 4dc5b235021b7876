"""Process side of a worker: receive the setup and requests of the owner, run a handler for each, and send its results.

    parent = Parent(stack_file)               # first, in the main thread
    setup = parent.get()                      # None if the owner has closed the worker
    parent.ready(value)
    parent.serve(call, call_async)

For user code, stdin is empty and stdout is redirected to stderr, so that user code cannot corrupt the messages; the
owner reads stderr. A child that user code forks exits silently if it returns to this module. User code runs in the main
thread, where signal handlers can be set. A second thread reads the messages. The guard of the process ends it if the
owner exits during a call.
"""

import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from camshaft.stacks import dump_stacks_on_signal
from camshaft.stop import ignore_stop_signals
from camshaft.subprocesses import pack, receive, send, unpack
from camshaft.workers.messages import Batch, Ready, Reply, Request, Started

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


class Parent:
    """Connection of this process to the owner of the worker."""

    def __init__(self, stack_file: int):
        """Connect to the owner. Write stacks to the descriptor `stack_file` on request."""
        ignore_stop_signals()
        dump_stacks_on_signal(stack_file)
        pipe, self._outbox = _redirect_pipes()
        self._pid = os.getpid()
        self._send(Started(self._pid))
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._notify: Callable[[], object] = lambda: None
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def get(self) -> Any:
        """Wait for the next message of the owner. None means that it sends no more."""
        return self._inbox.get()

    def ready(self, value: Any) -> None:
        """Send the result of the setup."""
        self._send(Ready(value))

    def serve(self, call: Callable[[Any], Any], call_async: Callable[[Any], Awaitable[Any]]) -> None:
        """Answer requests until the owner closes the worker.

        Args:
            call: Maps the payload of a request to the value of its reply. It handles all exceptions of user code.
            call_async: The same for concurrent requests. It is cancelled at the time limit.
        """
        batch: Batch | None = self.get()
        while batch is not None:
            if batch.concurrent:
                batch = event_loop().run_until_complete(self._serve_concurrently(batch, call_async))
                continue
            for request in batch.requests:
                start = time.perf_counter()
                value = call(request.payload)
                self._send(Reply(request.id, value, time.perf_counter() - start))
            batch = self.get()

    async def _serve_concurrently(
        self, first_batch: Batch, call_async: Callable[[Any], Awaitable[Any]]
    ) -> Batch | None:
        """Run requests as concurrent tasks, and send each result when it is available.

        Return the first batch that is not concurrent, or None, when all tasks have ended.
        """
        import asyncio

        async def answer(request: Request, timeout: float) -> None:
            start = time.perf_counter()
            limit, value = asyncio.timeout(timeout), None
            with contextlib.suppress(TimeoutError):
                async with limit:
                    value = await call_async(request.payload)
            self._send(Reply(request.id, value, time.perf_counter() - start, limit.expired()))

        tasks: set[asyncio.Task[None]] = set()
        batch: Batch | None = first_batch
        while batch is not None and batch.concurrent:
            for request in batch.requests:
                task = asyncio.create_task(answer(request, batch.timeout))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            batch = await self._get_async()
        await asyncio.gather(*tasks)
        return batch

    async def _get_async(self) -> Batch | None:
        """Wait for the next message while the tasks of the event loop run."""
        import asyncio

        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._notify = lambda: loop.call_soon_threadsafe(arrived.set)
        while self._inbox.empty():
            await arrived.wait()
            arrived.clear()
        self._notify = lambda: None
        return self._inbox.get()

    def _read(self, pipe: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            while True:
                self._put(unpack(receive(pipe)))
        self._put(None)

    def _put(self, message: Any) -> None:
        self._inbox.put(message)
        self._notify()

    def _send(self, message: Started | Ready | Reply) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # this is a forked child that returned from user code; only the parent sends results
        try:
            send(self._outbox, pack(message))
        except BrokenPipeError:
            os._exit(0)  # the owner has exited


@functools.cache
def event_loop() -> "AbstractEventLoop":
    """Return the event loop of this process. The import is deferred, because it takes half of the start of a worker."""
    import asyncio

    return asyncio.new_event_loop()


def _redirect_pipes() -> tuple[int, int]:
    pipe, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return pipe, outbox
