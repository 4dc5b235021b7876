"""The log of commands under random repetitions, orders, gaps, and kills of the server.

The oracle is a model of a few lines: the result of command n is the list of the numbers that ran before it, so a
command that runs twice, too early or not at all changes the results of all later ones.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from camshaft.service.commands import Command, CommandLog, Job, JobQueue
from camshaft.service.errors import Refused
from camshaft.service.futures import Future, Futures, Result
from camshaft.service.store import LOG, Entry, Store, add_session

MODEL = "s:train:0"
NUMBERS = st.integers(1, 12)


class LosingStore(Store):
    """A store that can lose what it has not committed yet, as a killed process does."""

    is_killed = False

    def _commit(self, writes: Any) -> bool:
        if self.is_killed:
            writes.clear()
            return True
        return super()._commit(writes)


class Server:
    """A server with one model, whose state is the list of the commands that it has executed."""

    def __init__(self, path: Path):
        self.store = LosingStore(path)
        self.queue, self.futures = JobQueue(self.store), Futures()
        self.executed: list[int] = []
        self.log = CommandLog(MODEL, self.queue, self.futures, self.prepare)
        for entry in self.store.executed(MODEL, after=0):  # the state, from the log
            assert entry.content is not None
            self.execute(entry.number, entry.abandoned is not None)
        for entry in self.store.entries():
            self.log.restore(entry)

    def execute(self, number: int, is_abandoned: bool = False) -> Result:
        if not is_abandoned:
            self.executed.append(number)
        return Result.of_json({"executed": self.executed})

    def prepare(self, entry: Entry, future: Future) -> Command:
        def execute(_: Sequence[Job]) -> list[Result]:
            return [self.execute(entry.number)]

        return Command(Job(future, execute, keeps_content=True), lambda reason: Result.of_error("user", reason))

    def run(self, count: int) -> None:
        """Execute queued jobs, as the thread of the queue does."""
        for _ in range(min(count, len(self.queue))):
            (job,) = self.queue._take()
            self.queue._deliver(job, job.execute([job])[0])


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / LOG
        self.server = Server(self.path)
        self.server.store.write(add_session("s", "local"))
        self.server.store.flush()
        self.promises: dict[int, tuple[str, bytes]] = {}
        """Future and body of each number that has been accepted."""
        self.delivered: dict[int, bytes] = {}
        self.given_up: set[int] = set()
        self.last_given_up = 0

    def teardown(self) -> None:
        self.server.store.close()
        self.folder.cleanup()

    @rule(number=NUMBERS, body=st.sampled_from([b"a", b"a", b"a", b"b"]))
    def submit(self, number: int, body: bytes) -> None:
        known = self.promises.get(number)
        if known is not None and known[1] != body:
            with pytest.raises(Refused, match="was already sent with another body"):
                self.server.log.submit(number, "step", body)
        elif known is None and number < self.last_given_up:
            with pytest.raises(Refused, match="arrived too late"):
                self.server.log.submit(number, "step", body)
        else:
            future = self.server.log.submit(number, "step", body)
            assert known in (None, (future.identifier, body))
            self.promises[number] = future.identifier, body

    @rule(count=st.integers(1, 6))
    def execute(self, count: int) -> None:
        self.server.run(count)

    @rule()
    def deliver(self) -> None:
        self.server.store.flush()
        self.record_results()

    def record_results(self) -> None:
        for number, (identifier, _) in self.promises.items():
            future = self.server.futures.find(identifier)
            assert future is not None
            if (result := future.wait(0.0)) is not None:
                assert self.delivered.setdefault(number, result.body) == result.body

    @precondition(lambda self: self.server.log._waiting)
    @rule()
    def end_gap(self) -> None:
        waiting = set(self.server.log._waiting)
        self.server.log.end_gap(0.0)
        self.given_up |= waiting
        self.last_given_up = max(waiting)

    @rule(is_flushed=st.booleans())
    def kill(self, is_flushed: bool) -> None:
        """Start the server again from what is on the disk; its queue, state and unwritten results are lost."""
        self.server.store.flush()  # a submission or a given-up gap is written; results may be lost
        if not is_flushed:
            self.server.store.is_killed = True
            self.server.run(2)
            self.record_results()
        self.server.store.close()
        self.server = Server(self.path)
        for number in self.delivered:
            restored = self.server.futures.find(self.promises[number][0])
            assert restored is not None
            assert not restored.is_pending, "a result was delivered before it was on the disk"

    @invariant()
    def delivered_results_are_those_of_the_oracle(self) -> None:
        ran: list[int] = []
        for number in sorted(self.delivered):
            if number in self.given_up:
                assert b"did not arrive" in self.delivered[number]
        for number in sorted(set(self.promises) - self.given_up):
            ran.append(number)
            if number in self.delivered:
                assert json.loads(self.delivered[number])["executed"] == ran

    @invariant()
    def no_command_runs_twice_or_before_an_earlier_one(self) -> None:
        assert self.server.executed == sorted(set(self.server.executed))


TestLog = Machine.TestCase
