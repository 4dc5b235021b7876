"""Run a function on real gloo ranks.

    def all_sum(value: float) -> float:              # at the top level of a test module or of support
        total = torch.tensor(value)
        torch.distributed.all_reduce(total)
        return total.item()

    assert run_ranks(all_sum, 2, 1.5) == [3.0, 3.0]

Ranks are processes of the fork server, with one thread each; a call takes a fraction of a second after the
first. What a rank raises is raised here, with the rank's traceback as a note.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from camshaft.controller import Dispatch, Options, PoolSpec, Worker, register, spawn
from camshaft.controller.local import PRELOAD, processes
from camshaft.errors import WorkerError

# A test module is known as tests.unit....; ranks find it under that name from the root of the checkout.
ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

PRELOAD.append("transformers.models.qwen2.modeling_qwen2")


class _Runner(Worker):
    def __init__(self) -> None:
        torch.set_num_threads(1)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*args)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """`function(*args)` on each rank of a gloo group (of one, too); the results in the order of ranks."""
    try:
        options = Options(timeout=timeout, preload=(__name__,))
        pool = processes(PoolSpec(function.__name__, ranks_per_node=world_size), options)
        try:
            runner = spawn(_Runner, pool=pool, name=function.__name__, timeout=timeout)
            return runner.run([function] * world_size, [args] * world_size)
        finally:
            pool.shutdown()
    except WorkerError as error:
        if error.__cause__ is None:
            raise
        error.__cause__.add_note(str(error))
        raise error.__cause__ from None
