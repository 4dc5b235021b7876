"""Call trackers so that their errors and hangs do not affect training.

    tracker = ThreadedTracker("wandb", lambda: WandbTracker(run))    # raises errors of the constructor
    tracker.put(lambda it: it.log(metrics, step), step)        # returns immediately
    tracker.finish("finished")                                 # returns within FINISH_SECONDS

The first call that fails is logged. Failed calls are not repeated, and later steps are still sent. If a call hangs, a
warning is logged once, and the following calls are queued. When the queue is full, further calls are discarded.
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
"""Maximum startup time of a tracker. It exceeds the timeouts of all tracker libraries except MLflow."""
SLOW_SECONDS = 60.0
"""Duration of a call after which a warning is logged."""
FINISH_SECONDS = 60.0
"""Maximum time to wait for outstanding calls at the end of a run."""
MAX_QUEUED_CALLS = 1000

logger = logging.getLogger(__name__)


class SynchronousTracker:
    """A tracker that is called synchronously. `errors` are the exceptions that are logged."""

    def __init__(self, name: str, start: Callable[[], Tracker], errors: type[BaseException] = Exception):
        self.name, self._errors = name, errors
        self._calls = self._failed = 0
        self._tracker = start()

    def put(self, call: Call, step: int) -> None:
        """Call the tracker, and log a warning for the first call that fails."""
        self._calls += 1
        try:
            call(self._tracker)
        except self._errors as error:
            self._failed += 1
            if self._failed == 1:
                message = "the tracker '%s' failed at step %d: %s: %s. The run continues to log later steps"
                logger.warning(message, self.name, step, type(error).__name__, error)

    def finish(self, ending: Ending) -> None:
        """Record the final state of the run, and close the tracker."""
        try:
            self._tracker.on_run_end(ending)
            self._tracker.finish()
        except self._errors as error:
            logger.warning("the tracker '%s' failed to close: %s: %s", self.name, type(error).__name__, error)
        if self._failed > 1:
            logger.warning("the tracker '%s' failed in %d of %d calls", self.name, self._failed, self._calls)


class ThreadedTracker:
    """A tracker that is started, called and closed in a separate thread. Waits for the thread have a time limit."""

    def __init__(self, name: str, start: Callable[[], Tracker]):
        self.name = name
        self._queue: queue.Queue[tuple[Call, int] | Ending] = queue.Queue(MAX_QUEUED_CALLS)
        self._busy_since: float | None = None
        self._slow = self._full = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(start, started), name=f"tracker-{name}", daemon=True)
        self._thread.start()
        try:
            started.result(timeout=START_SECONDS)
        except TimeoutError as error:
            if started.done():
                raise  # raised by the tracker
            raise TimeoutError(f"the tracker did not start within {START_SECONDS:g} s") from error

    def put(self, call: Call, step: int) -> None:
        """Queue a call of the tracker."""
        start_time = self._busy_since
        if start_time is not None and time.monotonic() - start_time > SLOW_SECONDS and not self._slow:
            self._slow = True
            message = "the tracker '%s' has not responded for %.0f s. The run continues, and metrics are queued"
            logger.warning(message, self.name, time.monotonic() - start_time)
        try:
            self._queue.put_nowait((call, step))
        except queue.Full:
            if not self._full:
                self._full = True
                message = "the queue of the tracker '%s' is full; it loses metrics from step %d on"
                logger.warning(message, self.name, step)

    def finish(self, ending: Ending) -> None:
        """Close the tracker. If it does not close within FINISH_SECONDS, log a warning and return."""
        deadline = time.monotonic() + FINISH_SECONDS
        try:
            self._queue.put(ending, timeout=FINISH_SECONDS)
        except queue.Full:
            pass  # reported below
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            message = "the tracker '%s' did not finish within %g s after the end of the run and is abandoned"
            logger.warning(message, self.name, FINISH_SECONDS)

    def _work(self, start: Callable[[], Tracker], started: Future[None]) -> None:
        try:
            # SystemExit would end this thread without a message.
            tracker = SynchronousTracker(self.name, start, BaseException)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while True:
            item = self._queue.get()
            self._busy_since = time.monotonic()
            if isinstance(item, str):
                tracker.finish(item)
                return
            tracker.put(*item)
            self._busy_since = None
