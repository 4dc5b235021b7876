"""Schedule of validations and checkpoints: every few steps, or by time.

    tests = Schedule(config.trainer.test_freq)
    if tests.is_due(step, is_last=step == total):
        with tests.measure():
            validate()

With the frequency `auto`, the schedule adapts to the cost of the action: it takes up to a fifth of the time of the run.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal

SAVE_INTERVAL = 600.0
"""Minimum time in seconds between two checkpoints that are saved by time."""
_TRAINING_SHARE = 4
"""Minimum ratio of the time between two actions to the time of an action."""


class Schedule:
    """Decide in which steps an action is due. The last step is always one of them, unless the frequency is -1.

    With the frequency `auto`, an action is due `interval` seconds after the previous one or the start of the run, or
    after four times the seconds that the previous action took, if that is longer.
    """

    def __init__(
        self, frequency: int | Literal["auto"], interval: float = 0.0, clock: Callable[[], float] = time.monotonic
    ):
        self._frequency, self._interval, self._clock = frequency, interval, clock
        self._end, self._cost = clock(), 0.0

    def is_due(self, step: int, is_last: bool) -> bool:
        if self._frequency == -1 or is_last:
            return self._frequency != -1
        if isinstance(self._frequency, str):
            return self._clock() - self._end >= max(self._interval, _TRAINING_SHARE * self._cost)
        return step % self._frequency == 0

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the time of an action."""
        start = self._clock()
        try:
            yield
        finally:
            self._end = self._clock()
            self._cost = self._end - start
