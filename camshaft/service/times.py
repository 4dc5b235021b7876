"""Times of each session: training, sampling, waiting for other clients, and waiting for its client.

times.added("2f9a")                        # a job of the session is in the queue
with times.working({"2f9a": 1.0}, "train"): ...
times.finished("2f9a")
(times.now("2f9a") - earlier).client       # seconds in which no job of the session was there
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["train", "sample"]
TRAIN: Kind = "train"
SAMPLE: Kind = "sample"


@dataclass(frozen=True)
class Times:
    """Seconds up to a moment, or between two of them."""

    step: float = 0.0
    """All of them."""
    present: float = 0.0
    """At least one job of the session was queued or running."""
    train: float = 0.0
    sample: float = 0.0

    @property
    def queue(self) -> float:
        """Jobs of the session waited, mostly for those of other clients, while it neither trained nor sampled.

        If it has trained and sampled at the same time, this is a lower bound.
        """
        return max(0.0, self.present - self.train - self.sample)

    @property
    def client(self) -> float:
        """The server waited for the client."""
        return max(0.0, self.step - self.present)

    def __sub__(self, other: "Times") -> "Times":
        values = (getattr(self, name) - getattr(other, name) for name in ("step", "present", "train", "sample"))
        return Times(*values)


@dataclass
class _Session:
    num_jobs: int = 0
    since: float = 0.0
    """Time since which there are jobs."""
    present: float = 0.0
    train: float = 0.0
    sample: float = 0.0
    has_ended: bool = False


class SessionTimes:
    """Times of all sessions. Jobs are added by several threads. Those of each kind run in one thread."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._running: dict[Kind, tuple[Mapping[str, float], float]] = {}
        """Shares of the sessions in the job of each kind that runs, and its start."""
        self._lock = threading.Lock()

    def added(self, session: str) -> None:
        with self._lock:
            entry = self._sessions.setdefault(session, _Session())
            if not entry.num_jobs:
                entry.since = time.monotonic()
            entry.num_jobs += 1

    def finished(self, session: str) -> None:
        with self._lock:
            entry = self._sessions[session]
            entry.num_jobs -= 1
            if not entry.num_jobs:
                entry.present += time.monotonic() - entry.since
                if entry.has_ended:
                    del self._sessions[session]

    def forget(self, session: str) -> None:
        """Forget a session after its last job, which calls this."""
        with self._lock:
            self._sessions[session].has_ended = True

    @contextlib.contextmanager
    def working(self, shares: Mapping[str, float], kind: Kind) -> Iterator[None]:
        """Count the time of the block for sessions, each with its share."""
        with self._lock:
            self._running[kind] = shares, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                for session in shares:
                    entry, seconds = self._sessions[session], self._seconds_of(session, kind)
                    if kind == TRAIN:
                        entry.train += seconds
                    else:
                        entry.sample += seconds
                del self._running[kind]

    def now(self, session: str) -> Times:
        """Return the times of a session until now, including the job that runs."""
        with self._lock:
            now, entry = time.monotonic(), self._sessions.get(session, _Session())
            present = entry.present + (now - entry.since if entry.num_jobs else 0.0)
            train, sample = (self._seconds_of(session, kind) for kind in (TRAIN, SAMPLE))
            return Times(now, present, entry.train + train, entry.sample + sample)

    def _seconds_of(self, session: str, kind: Kind) -> float:
        """Return the share of a session in the job that runs, if it is of a kind."""
        if kind not in self._running:
            return 0.0
        shares, start = self._running[kind]
        return shares.get(session, 0.0) * (time.monotonic() - start)
