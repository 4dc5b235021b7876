"""Keep long-lived objects out of Python's garbage collection.

    with frozen_objects():
        trainer.fit(tracking)

Python runs a full collection only after the number of objects has grown by a quarter since the last one. The modules
of a run consist of a million objects, so that takes hours. Until then, garbage and free lists of the interpreter
accumulate, and the full collection writes to each object, which copies the memory that a process shares with the
process that it was forked from. Without these objects, full collections are frequent and fast.
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
