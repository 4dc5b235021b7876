"""States of the global generators of Python and numpy, for each of several environments in a process."""

import contextlib
import random
import sys
from collections.abc import Awaitable, Generator, Iterator
from typing import Any


class Seeded:
    """Awaits a coroutine with the random state of its environment, whenever it runs."""

    def __init__(self, awaitable: Awaitable[Any], state: "RandomState"):
        self._awaitable, self._state = awaitable, state

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._awaitable.__await__()
        proceed, value = steps.__next__, ()
        while True:
            try:
                with self._state.active():
                    waited = proceed(*value)
            except StopIteration as end:
                return end.value
            try:
                yield waited
                proceed, value = steps.__next__, ()
            except BaseException as error:  # a cancellation, which belongs to the coroutine
                proceed, value = steps.throw, (error,)


class RandomState:
    """The states of the global generators of Python and numpy for one environment."""

    def __init__(self, seed: int):
        self._seed = seed
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Use these states inside the block, and restore those of the process afterwards."""
        python, numpy = random.getstate(), sys.modules.get("numpy")
        outer = None if numpy is None else numpy.random.get_state()
        random.setstate(self._python)
        if numpy is not None:
            self._set_numpy(numpy)
        try:
            yield
        finally:
            self._python = random.getstate()
            random.setstate(python)
            if numpy is not None:  # an environment that imports numpy in a call gets its own state in the next one
                self._numpy = numpy.random.get_state()
                numpy.random.set_state(outer)

    def _set_numpy(self, numpy: Any) -> None:
        if self._numpy is None:
            numpy.random.seed(self._seed % 2**32)
        else:
            numpy.random.set_state(self._numpy)
