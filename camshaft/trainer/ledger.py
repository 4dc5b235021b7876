"""Bookkeeping of a pipeline: which batch was drawn, sent to the rollout, received and learned, and how old it is.

    ledger = Ledger(max_staleness=1, total=100)
    for step in ledger.due(learned=0):                       # 1 and 2: those that may be generated now
        ledger.sent(step, version=0, uids=uids, position=position)
    ledger.received(1, versions=[0])
    ledger.learned(1)                                        # 2 is under way
    ledger.state_dict()                                      # resumes with batch 2

Step b learns batch b, and the weights after it have version b. Batch b may be generated as soon as step b - 1 - k is
learned, with k = `max_staleness`, so it is sent with version max(0, b - 1 - k) and has an age of at most k when step b
trains version b - 1. Several optimizer steps in one iteration are one version. A batch that was sent under another
bound, before a run resumed with a smaller one, keeps its age.

The module knows neither clocks nor threads nor tensors: the order of its calls is the schedule.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from camshaft.errors import LedgerError


@dataclass(frozen=True)
class Batch:
    """A batch that was sent to the rollout."""

    step: int
    """Step that learns the batch."""
    version: int
    """Version of the weights that generate it."""
    uids: tuple[str, ...]
    """Prompts of the batch."""
    position: Mapping[str, Any]
    """State of the loader before it drew the prompts."""

    @property
    def age(self) -> int:
        """Version that the step trains, minus the version that generated the batch."""
        return self.step - 1 - self.version

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        return cls(int(state["step"]), int(state["version"]), tuple(state["uids"]), dict(state["position"]))


class Ledger:
    """The batches of a run that are sent and not learned yet. Steps 1 to `total` learn one batch each."""

    def __init__(self, max_staleness: int, total: int):
        self.max_staleness, self.total = max_staleness, total
        self.last_learned = 0
        """Last step that has got its batch."""
        self._under_way: dict[int, Batch] = {}
        self._received: set[int] = set()

    def under_way(self) -> Sequence[Batch]:
        """Return the batches that are sent and not learned, the oldest first."""
        return tuple(self._under_way.values())

    @property
    def position(self) -> Mapping[str, Any] | None:
        """State of the loader before the oldest batch that is not learned; None if there is none."""
        return next((batch.position for batch in self._under_way.values()), None)

    def due(self, learned: int) -> range:
        """Return the steps whose batches may be generated after step `learned`, and are not sent yet."""
        last_sent = next(reversed(self._under_way), self.last_learned)
        return range(last_sent + 1, min(self.total, learned + 1 + self.max_staleness) + 1)

    def sent(self, step: int, version: int, uids: Collection[str], position: Mapping[str, Any]) -> None:
        """Record a batch that is generated with the weights of `version`; raise LedgerError if it would be too old."""
        batch = Batch(step, version, tuple(uids), dict(position))
        expected = next(reversed(self._under_way), self.last_learned) + 1
        if step != expected:
            raise LedgerError(f"batch {step} was sent, but batch {expected} is next; send the batches in their order")
        if not 0 <= batch.age <= self.max_staleness:
            raise LedgerError(
                f"batch {step} would be generated with version {version} and trained by version {step - 1}; "
                f"max_staleness={self.max_staleness} allows versions from {max(0, step - 1 - self.max_staleness)} on"
            )
        self._under_way[step] = batch

    def received(self, step: int, versions: Collection[int]) -> None:
        """Record the responses of a batch; raise LedgerError unless `versions`, those of its tokens, are as sent."""
        batch = self._under_way.get(step)
        if batch is None:
            raise LedgerError(f"batch {step} was received, but it is not under way")
        if set(versions) - {batch.version}:
            raise LedgerError(
                f"batch {step} was sent to weights of version {batch.version}, but its tokens are from versions "
                f"{sorted(set(versions))}"
            )
        self._received.add(step)

    def learned(self, step: int) -> dict[str, float]:
        """Record that a step has got its batch to learn, and return the metrics of the batches under way."""
        if step != self.last_learned + 1:
            raise LedgerError(f"step {step} cannot learn its batch; step {self.last_learned + 1} is next")
        if step not in self._received:
            raise LedgerError(f"step {step} cannot learn its batch, which has no responses yet; receive it first")
        del self._under_way[step]
        self._received.discard(step)
        self.last_learned = step
        return {"async/batches_in_flight": float(len(self._under_way))}

    def withdraw(self) -> None:
        """Forget the batches under way, which will be sent again."""
        self._under_way.clear()
        self._received.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the last step that is learned, and the batches under way. The state contains JSON values."""
        return {"learned": self.last_learned, "under_way": [asdict(batch) for batch in self._under_way.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: another `max_staleness` applies to batches that are sent from now on."""
        self.last_learned = int(state.get("learned", 0))
        batches = [Batch.from_state(batch) for batch in state.get("under_way", ())]
        self._under_way = {batch.step: batch for batch in batches}
        self._received &= self._under_way.keys()
