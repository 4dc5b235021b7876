"""A tracker can fail or hang; the run that it watches goes on.

    tracker = OwnThread("wandb", lambda: WandbTracker(run))    # raises what the constructor raises
    tracker.put(lambda it: it.log(metrics, step), step)        # returns at once
    tracker.finish("finished")                                 # returns within FINISH_SECONDS

A call that fails is told once and not repeated; the next step is tried again. A tracker that does not answer is told
once as well; what it has not taken waits in a queue, and what does not fit there any more is lost to it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from camshaft.tracking.base import Ending, Tracker

Call = Callable[[Tracker], None]

START_SECONDS = 120.0
"""How long a run waits for a tracker to start; the libraries' own limits are below it, but for MLflow's."""
SLOW_SECONDS = 60.0
"""A call that takes longer is told to the user."""
FINISH_SECONDS = 60.0
"""How long the end of a run waits for what a tracker has not taken yet."""
WAITING = 1000
"""Calls that wait at most."""

logger = logging.getLogger(__name__)


class InTurn:
    """A tracker that the caller waits for."""

    def __init__(self, name: str, start: Callable[[], Tracker]):
        self.name = name
        self._calls = self._failed = 0
        self._tracker = start()

    def put(self, call: Call, step: int) -> None:
        """Do this with the tracker."""
        self._calls += 1
        try:
            call(self._tracker)
        except Exception as error:
            self._failed += 1
            if self._failed == 1:
                said = "the tracker '%s' failed at step %d: %s: %s. The run goes on; the next step is tried again"
                logger.warning(said, self.name, step, type(error).__name__, error)

    def finish(self, ending: Ending) -> None:
        """Close the tracker."""
        try:
            self._tracker.ended(ending)
            self._tracker.finish()
        except Exception as error:
            logger.warning("the tracker '%s' did not close: %s: %s", self.name, type(error).__name__, error)
        if self._failed > 1:
            logger.warning("the tracker '%s' failed in %d of %d calls", self.name, self._failed, self._calls)


class OwnThread:
    """A tracker in a thread of its own, where it is started, called and closed; nobody waits for it for long."""

    def __init__(self, name: str, start: Callable[[], Tracker]):
        self.name = name
        self._waiting: queue.Queue[tuple[Call, int] | Ending] = queue.Queue(WAITING)
        self._busy_since: float | None = None
        self._slow = self._full = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(start, started), name=f"tracker-{name}", daemon=True)
        self._thread.start()
        try:
            started.result(timeout=START_SECONDS)
        except TimeoutError as error:
            if started.done():
                raise  # the tracker's own
            raise TimeoutError(f"no answer within {START_SECONDS:g} s") from error

    def put(self, call: Call, step: int) -> None:
        """Do this with the tracker, some time."""
        began = self._busy_since
        if began is not None and time.monotonic() - began > SLOW_SECONDS and not self._slow:
            self._slow = True
            said = "the tracker '%s' has not answered for %.0f s. The run goes on; its metrics wait"
            logger.warning(said, self.name, time.monotonic() - began)
        try:
            self._waiting.put_nowait((call, step))
        except queue.Full:
            if not self._full:
                self._full = True
                logger.warning("the tracker '%s' is too far behind: from step %d on it loses metrics", self.name, step)

    def finish(self, ending: Ending) -> None:
        """Close the tracker, or leave it behind."""
        until = time.monotonic() + FINISH_SECONDS
        try:
            self._waiting.put(ending, timeout=FINISH_SECONDS)
        except queue.Full:
            pass  # it is told below
        else:
            self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            said = "the tracker '%s' did not take everything within %g s of the end and is left behind"
            logger.warning(said, self.name, FINISH_SECONDS)

    def _work(self, start: Callable[[], Tracker], started: Future[None]) -> None:
        try:
            tracker = InTurn(self.name, start)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while True:
            item = self._waiting.get()
            self._busy_since = time.monotonic()
            if isinstance(item, str):
                tracker.finish(item)
                return
            tracker.put(*item)
            self._busy_since = None
