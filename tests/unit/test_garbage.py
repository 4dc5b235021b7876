"""Garbage is collected within a few steps, and objects that live as long as a run are not."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from camshaft.garbage import frozen_objects

OBJECTS = 400_000
"""Number of long-lived objects, fewer than those of the modules of a run."""
MAX_STEPS = 30


class Node:
    """A reference cycle."""

    def __init__(self) -> None:
        self.cycle = self


@pytest.fixture
def objects() -> Iterator[list[list[int]]]:
    """Return long-lived objects, right after a full collection. Other objects of this process do not count."""
    gc.collect()
    gc.freeze()
    objects = [[number] for number in range(OBJECTS)]
    gc.collect()
    yield objects
    gc.unfreeze()


def steps_until_freed() -> int:
    """Return the number of steps until an old reference cycle is freed, or `MAX_STEPS`."""
    node = Node()
    gc.collect(1)  # moves the cycle to the oldest generation
    freed = weakref.ref(node)
    del node
    for step in range(MAX_STEPS):
        if freed() is None:
            return step
        batch = [[number] for number in range(2000)]
        gc.collect(1)  # the batch of a step outlives the young generations
        del batch
    return MAX_STEPS


@pytest.mark.usefixtures("objects")
def test_garbage_is_freed_within_a_few_steps() -> None:
    assert steps_until_freed() == MAX_STEPS, "with the long-lived objects, full collections are too rare for the test"
    with frozen_objects():
        assert steps_until_freed() < MAX_STEPS / 2


def test_frozen_objects_are_collected_after_the_block(objects: list[list[int]]) -> None:
    with frozen_objects():
        assert len(gc.get_objects()) < OBJECTS / 10
    assert len(gc.get_objects()) > len(objects)


def test_garbage_before_the_block_is_freed() -> None:
    freed = weakref.ref(Node())
    assert freed() is not None
    with frozen_objects():
        assert freed() is None
