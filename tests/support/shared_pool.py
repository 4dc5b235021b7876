"""Let runs on several ranks share their processes, which start and initialize FSDP only once.

    with shared_pool():
        camshaft("ppo", *ppo_args(folder, RANKS))       # starts two ranks
        camshaft("ppo", *ppo_args(other, RANKS))        # builds its roles in the same two

The roles of a run are dropped when it ends. A run that fails gets new ranks. Output of all ranks is in the folder of
the first run.
"""

import contextlib
from collections.abc import Generator, Sequence

import pytest

from camshaft.controller import Options, Pool, PoolSpec, placement
from camshaft.controller.process_pool import ProcessPool


@contextlib.contextmanager
def shared_pool() -> Generator[None]:
    """Replace the start of pools; a run with a single process or with several pools is not affected."""
    original, running = placement.pools, dict[int, ProcessPool]()

    @contextlib.contextmanager
    def pools(specs: Sequence[PoolSpec], backend: str, options: Options) -> Generator[list[Pool]]:
        if len(specs) > 1 or specs[0].world_size == 1:
            with original(specs, backend, options) as separate:
                yield separate
            return
        size = specs[0].world_size
        if size not in running:
            (pool,) = stack.enter_context(original(specs, backend, options))
            assert isinstance(pool, ProcessPool)
            running[size] = pool
        try:
            yield [running[size]]
        except BaseException:
            running.pop(size).shutdown()
            raise
        for key in list(running[size]._roles):  # pyright: ignore[reportPrivateUsage]
            running[size].drop(key)

    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "pools", pools)
        yield
