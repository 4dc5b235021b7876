"""A process for forecasts."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from support.processes import start_fork_server

from camshaft.controller.local import PRELOAD


@pytest.fixture(scope="package")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process without a process group, in which a fake one can be created."""
    start_fork_server(*PRELOAD)
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as executor:
        yield executor
