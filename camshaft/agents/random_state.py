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
    """The states of the global generators of Python and numpy for one environment.

    A normal number that the functions of `numpy.random` have drawn ahead, in pairs, does not outlast a call.
    """

    def __init__(self, seed: int):
        self._seed = seed
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Use these states inside the block, and restore those of the process afterwards."""
        python, numpy = random.getstate(), sys.modules.get("numpy")
        random.setstate(self._python)
        # Exchanging generators takes a hundredth of the time that exchanging their states takes.
        outer = None if numpy is None else self._exchange_numpy(numpy.random)
        try:
            yield
        finally:
            self._python = random.getstate()
            random.setstate(python)
            if numpy is not None:  # an environment that imports numpy in a call gets its own state in the next one
                numpy.random.set_bit_generator(outer)

    def _exchange_numpy(self, module: Any) -> Any:
        """Use the generator of this environment, and return the one that was used."""
        outer, is_new = module.get_bit_generator(), self._numpy is None
        self._numpy = module.MT19937(0) if is_new else self._numpy
        module.set_bit_generator(self._numpy)
        if is_new:
            module.seed(self._seed % 2**32)
        return outer
