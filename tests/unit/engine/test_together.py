"""Collectives that return one rank's result or error on all ranks."""

from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import run_warm_ranks

from camshaft.engine.collectives import on_every_rank, on_rank_zero, rank_and_size
from camshaft.errors import CheckpointError, EngineError

WORLD = 3


class Unpicklable(Exception):
    def __init__(self, text: str, more: int):
        super().__init__(text)
        self.more = more


def shared_results() -> tuple[list[int], list[int], list[int]]:
    group, rank = dist.group.WORLD, dist.get_rank()
    ran: list[int] = []
    first = on_rank_zero(group, lambda: ran.append(rank) or [rank, 7])
    return first, on_every_rank(group, lambda: rank * 10), ran


def test_the_result_of_rank_zero_reaches_all_ranks() -> None:
    results = run_warm_ranks(shared_results, WORLD)
    assert [(first, each) for first, each, _ in results] == [([0, 7], [0, 10, 20])] * WORLD
    assert [ran for _, _, ran in results] == [[0], [], []]


def shared_errors() -> list[str]:
    group, rank = dist.group.WORLD, dist.get_rank()

    def refuse() -> None:
        raise CheckpointError(f"rank {rank} said so")

    def refuse_later() -> None:
        if rank > 0:
            refuse()

    def strange() -> None:
        raise Unpicklable("odd", 3)

    errors = []
    for action in (
        lambda: on_rank_zero(group, refuse),
        lambda: on_every_rank(group, refuse_later),
        lambda: on_rank_zero(group, strange),
    ):
        try:
            action()
        except (CheckpointError, EngineError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_every_rank_raises_the_error_of_one() -> None:
    expected = ["CheckpointError: rank 0 said so", "CheckpointError: rank 1 said so", "EngineError: Unpicklable: odd"]
    assert run_warm_ranks(shared_errors, WORLD) == [expected] * WORLD


def results_in_subgroup() -> str | None:
    rank = dist.get_rank()
    group: Any = dist.new_group([1, 2], backend="gloo")
    return on_rank_zero(group, lambda: f"from {rank}") if rank else None


def test_rank_zero_is_relative_to_the_group() -> None:
    assert run_warm_ranks(results_in_subgroup, WORLD) == [None, "from 1", "from 1"]


def test_without_a_group_the_world_is_one_rank() -> None:
    assert rank_and_size(None) == (0, 1)
    assert on_rank_zero(None, lambda: 5) == 5
    assert on_every_rank(None, lambda: 5) == [5]
    with pytest.raises(ZeroDivisionError):
        on_every_rank(None, lambda: 1 // 0)
