"""`run_ranks`, the helper of all tests on several ranks."""

import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from camshaft.errors import BatchError, WorkerError


def sum_over_ranks(value: float) -> tuple[int, float]:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def refuse_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise BatchError("the batch lacks 'values'")
    dist.barrier()


def sleep_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def threads() -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_run_ranks_runs_a_function_on_every_rank(world_size: int):
    assert run_ranks(sum_over_ranks, world_size, 1.5) == [(rank, 1.5 * world_size) for rank in range(world_size)]


def test_an_error_of_a_rank_is_raised_with_its_traceback():
    with pytest.raises(BatchError, match="lacks 'values'") as exc_info:
        run_ranks(refuse_on_last_rank, 2)
    (note,) = exc_info.value.__notes__
    assert "rank 1 of 2" in note
    assert "in refuse_on_last_rank" in note


@pytest.mark.slow
def test_a_rank_that_hangs_is_shown_with_its_stack():
    with pytest.raises(WorkerError, match="in sleep_on_rank_zero"):
        run_ranks(sleep_on_rank_zero, 2, timeout=3)


def test_each_rank_has_one_thread():
    assert run_ranks(threads, 2) == [1, 1]
