"""Smoke tests fail if a process of a run outlives the test."""

from collections.abc import Iterator

import pytest
from support.processes import none_left_behind


@pytest.fixture(autouse=True)
def mark() -> Iterator[str]:
    with none_left_behind() as mark:
        yield mark
