"""The ledger of a pipeline: bounds, order, and prompts that are learned exactly once."""

import json
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from camshaft.errors import LedgerError
from camshaft.trainer.ledger import Ledger


@dataclass
class World:
    """A run without models: prompts are numbers, and the loader is the next number."""

    total: int
    max_staleness: int
    next_prompt: int = 0
    step: int = 0
    learned: list[int] = field(default_factory=list)
    sent_under: dict[int, int] = field(default_factory=dict)
    """Bound of each batch when it was sent."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.max_staleness, self.total)
        self.checkpoint = self.saved()

    def saved(self) -> str:
        position = self.ledger.position or {"next": self.next_prompt}
        return json.dumps([self.step, self.learned, position, self.ledger.state_dict()])

    def send(self) -> None:
        for step in self.ledger.due(self.step):
            uids = [f"{self.next_prompt}", f"{self.next_prompt + 1}"]
            self.ledger.sent(step, self.step, uids, {"next": self.next_prompt})
            self.next_prompt += 2
            self.sent_under[step] = self.max_staleness

    def learn(self) -> None:
        """Do one step. The age is computed from what the world has seen, not by the ledger."""
        batch = self.ledger.under_way()[0]
        assert batch.step == self.step + 1
        self.ledger.received(batch.step, {batch.version})
        assert 0 <= self.step - batch.version <= self.sent_under[batch.step]
        self.ledger.learned(batch.step)
        self.learned += map(int, batch.uids)
        self.step += 1

    def die(self, max_staleness: int) -> None:
        """Lose all memory, and resume from the checkpoint with another bound."""
        self.step, self.learned, position, state = json.loads(self.checkpoint)
        self.max_staleness = max_staleness
        self.ledger = Ledger(max_staleness, self.total)
        self.ledger.load_state_dict(state)
        self.next_prompt = position["next"] + sum(len(batch.uids) for batch in self.ledger.under_way())


def test_every_prompt_is_learned_once_through_deaths_and_other_bounds() -> None:
    steps, run = 0, 0
    deaths = Counter[str]()
    while steps < 100_000:
        choose = random.Random(run)
        run += 1
        world = World(total=choose.randint(1, 60), max_staleness=choose.randint(1, 5))
        while world.step < world.total:
            world.send()
            assert 1 <= len(world.ledger.under_way()) <= 1 + max(world.sent_under.values())
            if choose.random() < 0.05:
                deaths["sent"] += 1
                world.die(choose.randint(1, 5))
                continue
            world.learn()
            steps += 1
            if choose.random() < 0.3:
                world.checkpoint = world.saved()
            if choose.random() < 0.05:
                deaths["learned"] += 1
                world.die(choose.randint(1, 5))
        assert world.learned == list(range(2 * world.total))
        assert not world.ledger.under_way()
    assert min(deaths.values()) > 1000


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_batches_have_the_version_of_the_formula(max_staleness: int) -> None:
    world = World(total=12, max_staleness=max_staleness)
    versions: dict[int, int] = {}
    while world.step < world.total:
        world.send()
        versions |= {batch.step: batch.version for batch in world.ledger.under_way()}
        world.learn()
    assert versions == {step: max(0, step - 1 - max_staleness) for step in range(1, 13)}


def test_a_smaller_bound_learns_the_stored_batches_first() -> None:
    world = World(total=20, max_staleness=4)
    for _ in range(5):
        world.send()
        world.learn()
    world.checkpoint = world.saved()
    world.die(max_staleness=1)
    assert [(batch.step, batch.version) for batch in world.ledger.under_way()] == [(6, 1), (7, 2), (8, 3), (9, 4)]
    for _ in range(4):
        assert not world.ledger.due(world.step) or world.step == 8
        world.send()
        world.learn()
    assert [(batch.step, batch.version) for batch in world.ledger.under_way()] == [(10, 8)]


@pytest.mark.parametrize(
    ("step", "version", "message"),
    [
        (2, 0, "batch 2 was sent, but batch 1 is next"),
        (1, 1, "batch 1 would be generated with version 1"),
        (1, -2, "max_staleness=1 allows versions from 0 on"),
    ],
)
def test_a_batch_out_of_order_or_bound_is_rejected(step: int, version: int, message: str) -> None:
    with pytest.raises(LedgerError, match=message):
        Ledger(1, 5).sent(step, version, ["a"], {})


def test_tokens_of_another_version_are_rejected() -> None:
    ledger = Ledger(1, 5)
    ledger.sent(1, 0, ["a"], {})
    with pytest.raises(LedgerError, match=r"batch 1 was sent to weights of version 0, but .* versions \[0, 1\]"):
        ledger.received(1, {0, 1})
    with pytest.raises(LedgerError, match="batch 2 was received, but it is not under way"):
        ledger.received(2, {0})
    with pytest.raises(LedgerError, match="step 1 cannot learn its batch, which has no responses yet"):
        ledger.learned(1)
    with pytest.raises(LedgerError, match="step 2 cannot learn its batch; step 1 is next"):
        ledger.learned(2)
