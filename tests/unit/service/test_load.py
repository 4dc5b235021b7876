"""Many samples in flight at the same time."""

from pathlib import Path

import pytest
from support.tinker_load import sample_all, server_process

CPU_SECONDS = 0.002
"""Limit of the CPU time of the server for a request."""


@pytest.mark.parametrize("count", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_no_poll_of_samples_in_flight_fails(tmp_path: Path, count: int) -> None:
    with server_process(tmp_path) as server:
        sample_all(server.client(), 4)  # builds the rollout
        before = server.cpu_seconds()
        statuses = sample_all(server.client(), count)
        seconds = server.cpu_seconds() - before
    assert statuses.keys() <= {200, 408}
    assert statuses[200] == 2 * count
    assert seconds / statuses.total() < CPU_SECONDS
