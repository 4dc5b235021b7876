"""Smoke tests fail if a process of a run outlives the test."""

from collections.abc import Iterator

import pytest
from support.processes import none_left_behind, start_fork_server

from camshaft.controller.local import PRELOAD


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the server of the rank processes, which outlives the tests."""
    start_fork_server(*PRELOAD, "camshaft.roles", "transformers.models.qwen2.modeling_qwen2")


@pytest.fixture(autouse=True)
def mark() -> Iterator[str]:
    with none_left_behind() as mark:
        yield mark
