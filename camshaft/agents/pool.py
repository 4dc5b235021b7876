"""Environments in killable processes with time limits, several in each process.

    pool = EnvironmentPool(spec, num_workers=4, output=folder / "output.log")
    pool.check()                              # loads the environments in one process
    pool.reset({0: Start(...), ...})          # the interface of `Environments`
    pool.step({0: "5", ...})
    pool.submit({0: "6"})                     # does not wait
    pool.take(timeout=1.0)                    # {0: Turn(...)}
    pool.close()

An episode stays in one process. Each process makes one call at a time, or those of several episodes if they are
coroutines, each of which is cancelled at its time limit. If a call crashes the process or blocks it for longer, the
process is killed, with all processes that it has started. The other episodes of the process are then played again in a
new one: `reset` with the same arguments, and the same answers. Those that ran beside a call at fault are played one at
a time, so that it is found. An environment that says something else than before has failed. So has one that raises, but
each episode has one more attempt, except after a time limit of `step`.
"""

import logging
import os
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from camshaft.agents.calls import PolicyAnswer
from camshaft.agents.environment import Fault, Start, Turn, outcome_of
from camshaft.agents.messages import Call, Loaded, Reply, Scoring, Spec
from camshaft.errors import RolloutError
from camshaft.rewards.messages import Outcome, Sample
from camshaft.rewards.output import Output, OutputStream
from camshaft.subprocesses import NO_LIMIT, POLL_SECONDS, Wait, describe_process
from camshaft.workers.messages import Ready
from camshaft.workers.worker import CANCEL_SECONDS, Answer, Worker, close_all, wait_for

_MODULE = "camshaft.agents.host"

logger = logging.getLogger(__name__)


class _Process(Worker[int]):
    """A process of the pool. The key of a call is the number of its episode."""

    slot = 0
    """Position in the pool. A process that is replaced keeps it."""


@dataclass
class _Game:
    """An episode, with everything that is needed to play it again."""

    name: str
    """Name of the environment; empty for the first one."""
    start: bytes
    is_concurrent: bool = False
    """True if its calls are coroutines, which run at the same time as those of other episodes."""
    answers: list[Reply] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """Results of `reset` and of the answers."""
    is_hosted: bool = False
    """True if its environment exists in the process of its slot."""
    has_failed: bool = False
    """True after the first failure. The second one ends the episode."""
    is_alone: bool = False
    """True if its calls run alone, because one of several concurrent calls has ended their process."""

    def method(self) -> str:
        """Return the method that is called, with those that are repeated before it."""
        if not self.answers:
            return "reset"
        if not self.is_hosted:
            return f"reset and {len(self.turns) - 1} replies"
        reply = self.answers[-1]
        calls = [call.name for call in reply.calls] if isinstance(reply, PolicyAnswer) else []
        if isinstance(reply, Scoring):
            return "a reward function"
        return ", ".join(calls) or ("the score" if reply is None else "step")

    def request(self, number: int) -> tuple[Call, int]:
        """Return the next call of the episode, and the number of its results that are known already.

        An episode without an environment is first played again up to the call that has no result.
        """
        if self.is_hosted:
            return Call(number, None, tuple(self.answers[len(self.turns) - 1 :])), 0
        return Call(number, self.start, tuple(self.answers[: max(0, len(self.turns) - 1)])), len(self.turns)

    @property
    def is_waiting(self) -> bool:
        """True if an answer has no result."""
        return len(self.turns) <= len(self.answers)


class EnvironmentPool:
    """Up to `num_workers` processes, each of which hosts environments of several episodes."""

    def __init__(self, spec: Spec, num_workers: int, output: Path | None = None):
        """Create a pool without processes. `output` is the file for what the environments print."""
        self.spec, self.num_workers = spec, num_workers
        self._output = Output(output, "the environment")
        self._processes: list[_Process] = []
        self._games: dict[int, _Game] = {}
        self._queues: list[deque[int]] = [deque() for _ in range(num_workers)]
        """Episodes whose calls have not been made, for each process."""
        self._results: dict[int, Turn | Fault] = {}
        """Results that have not been taken."""
        self._pending: set[int] = set()
        """Episodes without a result of their last call."""
        self._wait = self._new_wait()
        self.num_failures = 0
        """Number of failed calls, including those that were repeated."""
        self.close = weakref.finalize(self, close_all, self._processes, os.getpid())
        """Stop all processes permanently. This also happens when the pool is deleted or the interpreter exits."""

    def check(self) -> Loaded:
        """Start one process. Raise RolloutError if it cannot load the environments."""
        process = self._start(0)
        wait = Wait("loading", RolloutError, NO_LIMIT)  # `wait_for` enforces the limit
        while True:
            _, events = wait_for([process], time.monotonic() + POLL_SECONDS)
            wait.check(partial(self._describe, process), process.stacks)
            for _, event in events:
                if isinstance(event, Ready):
                    return self._loaded(event.value)
                self._fail_loading(process)

    def reset(self, starts: Mapping[int, Start]) -> dict[int, Turn | Fault]:
        """Begin episodes. Episodes with the same numbers have ended."""
        return self._run(starts)

    def step(self, answers: Mapping[int, str | PolicyAnswer]) -> dict[int, Turn | Fault]:
        """Continue episodes with answers."""
        return self._run(answers)

    def submit(self, calls: Mapping[int, Start | Reply]) -> None:
        """Begin episodes, or continue them, without waiting for the results."""
        if not self.close.alive:
            raise RolloutError("the environments are closed; create a new EnvironmentPool")
        first = self.spec.sources[0].name if self.spec.sources else ""
        if not self._pending:
            self._wait = self._new_wait()
        for number, call in calls.items():
            if isinstance(call, Start):
                is_concurrent = (call.name or first) in self.spec.concurrent
                self._games[number] = _Game(call.name, pickle.dumps(call), is_concurrent)
            else:
                self._games[number].answers.append(call)
            self._queues[number % self.num_workers].append(number)
            self._pending.add(number)

    def take(self, timeout: float) -> dict[int, Turn | Fault]:
        """Return the results of submitted calls that are there, after at most `timeout` seconds without one."""
        until = time.monotonic() + timeout
        try:
            while True:
                self._start_calls()
                self._receive_events(min(until, time.monotonic() + POLL_SECONDS))
                if self._results or not self._pending or time.monotonic() >= until:
                    self._start_calls()
                    break
        except BaseException:  # calls may still run whose results will not be read
            for process in list(self._processes):
                self._kill(process)
            for waiting in (self._games, self._pending, self._results, *self._queues):
                waiting.clear()
            raise
        results, self._results = self._results, {}
        self._pending -= results.keys()
        return results

    def score(self, episodes: Sequence[int]) -> dict[int, Turn | Fault]:
        """Read the final scores of episodes."""
        return self._run(dict.fromkeys(episodes))

    def judge(self, samples: Mapping[int, Sample]) -> dict[int, list[Outcome]]:
        """Call the reward functions that take environments. A failure costs only its call."""
        outcomes: dict[int, list[Outcome]] = {number: [] for number in samples}
        functions = () if self.spec.rewards is None else self.spec.rewards.functions
        for function in range(len(functions)):
            calls = {number: Scoring(function, pickle.dumps(sample)) for number, sample in samples.items()}
            for number, turn in self._run(calls).items():
                if isinstance(turn, Fault):
                    self._games[number].answers.pop()
                outcomes[number].append(outcome_of(turn))
        return outcomes

    def end(self, episodes: Sequence[int]) -> None:
        """End episodes. Their environments may be reset for others."""
        for number in episodes:
            game = self._games.pop(number, None)
            if game is not None and game.is_hosted:
                process = self._at(number % self.num_workers)
                if process is not None:
                    process.submit([(number, Call(number, None, ()))], self.spec.timeout)
        self._finish_ends()

    # -- calls --------------------------------------------------------------------------------------

    def _run(self, calls: Mapping[int, Start | Reply]) -> dict[int, Turn | Fault]:
        """Make calls, and return the result of each."""
        self.submit(calls)
        results: dict[int, Turn | Fault] = {}
        while self._pending:
            results |= self.take(POLL_SECONDS)
        return results

    def _new_wait(self) -> Wait:
        return Wait("environments", RolloutError, NO_LIMIT)  # the time limit of each call bounds the wait

    def _start_calls(self) -> None:
        """Send the calls of queued episodes to the processes that can make them now."""
        for slot, queue in enumerate(self._queues):
            process = self._at(slot)
            if queue and process is None:
                process = self._start(slot)
            if queue and process is not None and process.is_ready:
                numbers = self._take_next(queue, list(process.calls.values()))
                if numbers:
                    self._submit(process, numbers)

    def _receive_events(self, until: float) -> None:
        """Wait for results, crashes or time limits until a time, and process them."""
        _, events = wait_for(self._processes, until)
        busy = [process for process in self._processes if process.calls or not process.is_ready]
        if busy:
            oldest = min(busy, key=lambda process: process.since)
            self._wait.check(partial(self._describe_call, oldest), oldest.stacks, oldest.since)
        for process, event in events:
            if isinstance(event, Ready):
                self._loaded(event.value)
            elif isinstance(event, Answer):
                self._receive(event.key, event.reply.value)
            elif not process.is_ready:
                self._fail_loading(process)
            else:
                self._replace(process, event.kind)

    def _take_next(self, queue: deque[int], running: Sequence[int]) -> list[int]:
        """Remove and return the next episodes of a process: one if it is idle, and all that can run beside others."""
        numbers: list[int] = []
        while queue:
            other = numbers[0] if numbers else next(iter(running), None)
            if other is not None and not (self._runs_beside(other) and self._runs_beside(queue[0])):
                break
            numbers.append(queue.popleft())
        return numbers

    def _runs_beside(self, number: int) -> bool:
        return self._games[number].is_concurrent and not self._games[number].is_alone

    def _submit(self, process: _Process, numbers: Sequence[int]) -> None:
        """Send the calls of episodes. The time limit of an episode is the sum of those of its calls."""
        calls = [(number, self._games[number].request(number)[0]) for number in numbers]
        limit, is_concurrent = max(self._limit(call) for _, call in calls), self._games[numbers[0]].is_concurrent
        # The process cancels coroutines itself, each at its own limit. This one is for those that block it.
        process.submit(calls, limit + CANCEL_SECONDS * is_concurrent, is_concurrent)

    def _limit(self, call: Call) -> float:
        start = 0 if call.start is None else self.spec.start_timeout
        return start + sum(map(self.spec.limit, call.answers))

    def _receive(self, number: int, turns: list[Turn | Fault]) -> None:
        """Process the results of the calls of an episode."""
        game = self._games[number]
        _, num_known = game.request(number)
        for index, turn in enumerate(turns):
            if isinstance(turn, Fault):
                self._retry(number, turn)
                return
            if index >= num_known:
                game.turns.append(turn)
            elif turn._replace(seconds=0) != game.turns[index]._replace(seconds=0):
                message = "the environment did not say the same again when its episode was repeated"
                game.has_failed = True
                self._retry(number, Fault("error", message))
                return
        game.is_hosted = True
        if game.is_waiting:
            self._queues[number % self.num_workers].appendleft(number)
        else:
            self._results[number] = game.turns[-1]

    def _retry(self, number: int, fault: Fault) -> None:
        """Repeat an episode after its first failure. The second failure is its result."""
        game = self._games[number]
        self.num_failures += 1
        game.is_hosted = False
        if game.has_failed or (fault.kind == "timeout" and game.turns):
            self._results[number] = fault
            return
        game.has_failed = True
        self._queues[number % self.num_workers].append(number)

    def _replace(self, process: _Process, kind: Any) -> None:
        """Kill a process that crashed or exceeded its time limit. Its other episodes will be repeated in a new one."""
        self._kill(process)
        running, _ = process.split_calls()
        limit = self._limit(self._games[running[0]].request(running[0])[0])
        for number, game in self._games.items():
            if number % self.num_workers == process.slot:
                game.is_hosted = False
        if len(running) > 1:  # which of them has failed shows when each runs alone
            for number in running:
                self._games[number].is_alone = True
                self._queues[number % self.num_workers].append(number)
            return
        (number,) = running
        messages = {
            "timeout": f"no result within {limit:g} s; the process was killed",
            "crash": f"the process {process.describe_exit()}",
        }
        self._retry(number, Fault(kind, messages[kind]))

    def _finish_ends(self) -> None:
        """Wait until the processes have noted the ends of episodes. One that fails is killed."""
        while any(process.calls for process in self._processes):
            _, events = wait_for(self._processes, time.monotonic() + POLL_SECONDS)
            for process, event in events:
                if not isinstance(event, Ready | Answer) and process in self._processes:
                    self._kill(process)
                    process.split_calls()

    # -- processes ----------------------------------------------------------------------------------

    def _at(self, slot: int) -> _Process | None:
        """Return the process of a slot. One that has ended between two calls is replaced."""
        process = next((process for process in self._processes if process.slot == slot), None)
        if process is None or not process.is_ready or process.calls or not process.is_dead:
            return process
        self._kill(process)
        for number, game in self._games.items():
            if number % self.num_workers == slot:
                game.is_hosted = False
        return None

    def _start(self, slot: int) -> _Process:
        write: Callable[[bytes], object] = OutputStream(self._output).write
        process = _Process(_MODULE, self.spec, self.spec.start_timeout, write)
        process.slot = slot
        self._processes.append(process)
        return process

    def _kill(self, process: _Process) -> None:
        process.kill()
        self._processes.remove(process)

    def _loaded(self, loaded: Loaded) -> Loaded:
        if loaded.error is not None:
            raise RolloutError(loaded.error)
        return loaded

    def _fail_loading(self, process: _Process) -> None:
        self._kill(process)
        raise RolloutError(
            f"{self._names()}: the process that loads it {process.describe_exit()} or took longer than "
            f"multi_turn.start_timeout={self.spec.start_timeout:g} s; see the output of the environment"
        )

    def _names(self) -> str:
        return "the environment " + ", ".join(source.target for source in (*self.spec.sources, *self.spec.functions))

    def _describe_call(self, process: _Process) -> str:
        """Return a description of the call that a process makes."""
        if not process.calls:
            return self._describe(process)
        number = next(iter(process.calls.values()))
        game = self._games[number]
        sources = [*self.spec.sources, *self.spec.functions]
        target = next((source.target for source in sources if source.name == game.name), sources[0].target)
        place = f"episode {number}, {describe_process(process.pid)}"
        return f"{game.method()} of {target} ({place}, limit {process.deadline - process.since:g} s)"

    def _describe(self, process: _Process) -> str:
        return f"{describe_process(process.pid)}, which runs {self._names()},"
