"""A process for forecasts."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from support.processes import forked_process


@pytest.fixture(scope="package")
def process() -> Iterator[ProcessPoolExecutor]:
    with forked_process() as executor:
        yield executor
