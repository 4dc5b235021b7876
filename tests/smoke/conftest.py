"""Whatever a smoke test does to a run, no process of the run may outlive it."""

from collections.abc import Iterator

import pytest
from support.processes import none_left_behind


@pytest.fixture(autouse=True)
def mark() -> Iterator[str]:
    with none_left_behind() as mark:
        yield mark
