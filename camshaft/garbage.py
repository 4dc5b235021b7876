"""Keep long-lived objects out of Python's garbage collection.

    with frozen_objects():
        trainer.fit(tracking)

Python runs a full collection only after the number of tracked objects has grown by a quarter. With the million objects
of a run's modules, this takes hours, and garbage accumulates meanwhile. A full collection also writes to every object,
which copies the memory pages that a forked process shares with its parent. Freezing the existing objects makes full
collections frequent and fast.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_objects() -> None:
    """Exclude all objects that exist from garbage collection."""
    gc.freeze()
    gc.collect()  # the next full collection depends on the number of objects in this one


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Exclude all objects that exist from garbage collection within the block.

    Garbage is freed before. Frozen garbage would keep its memory, such as tensors of a checkpoint, until the end.
    """
    gc.collect()
    freeze_objects()
    try:
        yield
    finally:
        gc.unfreeze()
