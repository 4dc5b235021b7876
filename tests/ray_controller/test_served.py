"""`camshaft serve` on Ray: two ranks give the results of two local ones, to the bit, also after the death of a rank."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.cluster import ray_here
from support.tinker_clients import RunningServer, datum, running_server

from camshaft.controller.process_pool import ProcessPool

pytestmark = [pytest.mark.timeout(280), pytest.mark.alone]

DATA = [datum([5 + row, *range(6, 7 + 3 * row)]) for row in range(5)]


def results(server: RunningServer, is_killed: bool) -> list[Any]:
    client = server.client()
    model = client.create_model(rank=4, seed=3)
    model.train(1, DATA)
    values = [model.wait(model.step(2, learning_rate=0.01)), model.log_probs(3, DATA)]
    model.wait(model.train(4, DATA))
    promise = model.command("save_weights_for_sampler", 5, sampling_session_seq_id=0)
    sampler = model.wait(promise)["sampling_session_id"]
    if is_killed:
        kill_rank(server)
    values.append([row[0] for row in client.sample(sampler, 0, [5, 6], 3, seed=1)])
    values += [model.wait(model.step(6)), model.log_probs(7, DATA)]
    return values


def kill_rank(server: RunningServer) -> None:
    pool = server.role._pool
    assert isinstance(pool, ProcessPool)
    pid = pool.processes[1].local_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_results_on_ray_are_those_of_local_ranks_also_after_a_kill(tmp_path: Path) -> None:
    with running_server(tmp_path / "local", ranks=2) as server:
        expected = results(server, is_killed=False)
    with ray_here(num_cpus=4):
        for number in (0, 1):
            options = {"ranks": 2, "sampling_ranks": number, "controller": "ray"}
            with running_server(tmp_path / f"ray{number}", **options) as server:
                assert results(server, is_killed=False) == expected
                assert results(server, is_killed=True) == expected
                assert server.role.generation == 1
