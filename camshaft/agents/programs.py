"""Programs that own the conversation, in killable processes with time limits, as many at a time as there are episodes.

    pool = ProgramPool(spec, output=folder / "output.log")
    pool.check()                                   # loads the program in one process
    with Endpoint(...) as endpoint:
        sessions = pool.play(endpoint, questions, episode_timeout=None)    # the episodes of each question
    pool.close()

Each episode has a session of the endpoint and a process of its own. A program that raises, crashes, returns no number
or sends no request has failed. It is run again once, from the beginning, with the same seeds. A program that takes
longer than `timeout` between an answer and its next request is killed, and has failed at once; up to the first request,
the limit is `start_timeout`. What the endpoint has ended (`length`, `turns`, `prompt`) is no failure of the program.
"""

import math
import os
import pickle
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from camshaft.agents.environment import Fault
from camshaft.agents.episode import Episode
from camshaft.agents.jobs import Job, Outcome, ProgramSpec, Stop, kept_variables
from camshaft.agents.messages import Loaded
from camshaft.agents.play import Question
from camshaft.agents.sessions import Idle
from camshaft.errors import RolloutError
from camshaft.rewards.output import Output, OutputStream
from camshaft.subprocesses import NO_LIMIT, POLL_SECONDS, Wait, describe_process
from camshaft.workers.messages import Ready
from camshaft.workers.worker import Answer, Failure, Worker, close_all, wait_for

_PROGRAM = "camshaft.agents.launcher"
_NUM_NAMED = 3
"""Number of slow programs that a log message names."""


class Sessions(Protocol):
    """The part of the endpoint that opens and closes sessions."""

    url: str

    def open(self, question: Question) -> str: ...
    def close(self, key: str) -> list[Episode]: ...
    def idle(self, key: str) -> Idle: ...


@dataclass
class _Run:
    """A running program and its session."""

    key: str
    since: float
    """Time of its start."""
    limit: Fault | None = None
    """Time limit that the program has exceeded."""
    is_over: bool = False
    """True if its episode has used up its time."""


class ProgramPool:
    """A process that starts programs."""

    def __init__(self, spec: ProgramSpec, output: Path | None = None):
        """Create a pool without processes. `output` is the file for what the programs print."""
        self.spec = spec
        self._output = Output(output, "the program")
        self._workers: list[Worker[Any]] = []
        """The process that starts programs, if it runs."""
        self._loaded = Loaded("the program is not loaded")
        self.num_failures = 0
        """Number of failed programs, including those that were repeated."""
        self.close = weakref.finalize(self, close_all, self._workers, os.getpid())
        """Stop all processes permanently. This also happens when the pool is deleted or the interpreter exits."""

    def check(self) -> Loaded:
        """Start the process. Raise RolloutError if it cannot load the program."""
        self.worker()
        return self._loaded

    def worker(self) -> Worker[Any]:
        """Return the process that starts programs, which has loaded the program."""
        if not self.close.alive:
            raise RolloutError("the programs are closed; create a new ProgramPool")
        if self._workers and self._workers[0].is_dead:
            self.end(self._workers[0])
        if not self._workers:
            write = OutputStream(self._output).write
            environment = kept_variables(os.environ)
            self._workers.append(Worker(_PROGRAM, self.spec, self.spec.start_timeout, write, environment))
            self._loaded = self._load(self._workers[0])
        if self._loaded.error is not None:
            raise RolloutError(self._loaded.error)
        return self._workers[0]

    def _load(self, worker: Worker[Any]) -> Loaded:
        wait = Wait("loading", RolloutError, NO_LIMIT)  # `wait_for` enforces the limit
        while True:
            _, events = wait_for([worker], time.monotonic() + POLL_SECONDS)
            wait.check(lambda: describe_process(worker.pid), worker.stacks)
            for _, event in events:
                if isinstance(event, Ready):
                    return event.value
                self.end(worker)
                raise RolloutError(
                    f"the program {self.spec.source.target}: the process that loads it {worker.describe_exit()} or "
                    f"took longer than multi_turn.start_timeout={self.spec.start_timeout:g} s; see its output"
                )

    def play(
        self, sessions: Sessions, questions: Sequence[Question], episode_timeout: float | None = None
    ) -> list[list[Episode]]:
        """Run a program for each question, and return the rows of its session, at least one.

        The last row has the reward of the program.
        """
        if not questions:
            return []
        try:
            return _Round(self, sessions, questions, episode_timeout).play()
        except BaseException:  # programs may still run
            for worker in list(self._workers):
                self.end(worker)
            raise

    def end(self, worker: Worker[Any]) -> None:
        """End the process, with all programs."""
        worker.kill()
        self._workers.remove(worker)


class _Round:
    """The programs of one call of `play`."""

    def __init__(
        self, pool: ProgramPool, sessions: Sessions, questions: Sequence[Question], episode_timeout: float | None
    ):
        self.pool, self.sessions, self.questions = pool, sessions, questions
        self.episode_timeout = math.inf if episode_timeout is None else episode_timeout
        self.waiting = deque(range(len(questions)))
        self.running: dict[int, _Run] = {}
        self.repeated: set[int] = set()
        self.results: dict[int, list[Episode]] = {}

    def play(self) -> list[list[Episode]]:
        wait, since = Wait("programs", RolloutError, NO_LIMIT), time.monotonic()  # the time limits bound the wait
        worker = self.pool.worker()
        while len(self.results) < len(self.questions):
            while self.waiting and len(self.running) < self.pool.spec.max_concurrency:
                self._start(worker, self.waiting.popleft())
            _, events = wait_for([worker], time.monotonic() + POLL_SECONDS)
            for _, event in events:
                since = time.monotonic()
                if isinstance(event, Answer):
                    self._receive(event.key, event.reply.value)
                elif isinstance(event, Failure):
                    self._lose(worker)
                    worker = self.pool.worker()
            self._enforce_limits(worker)
            wait.check(self._describe, since=since)
        return [self.results[number] for number in range(len(self.questions))]

    def _start(self, worker: Worker[Any], number: int) -> None:
        question = self.questions[number]
        key = self.sessions.open(question)
        self.running[number] = _Run(key, time.monotonic())
        job = Job(number, self.sessions.url, key, pickle.dumps(question.start))
        worker.submit([(number, job)], math.inf, concurrent=True)

    def _enforce_limits(self, worker: Worker[Any]) -> None:
        """Kill the programs that have exceeded a time limit."""
        for number, run in self.running.items():
            if run.limit is not None or run.is_over:
                continue
            idle = self.sessions.idle(run.key)
            limit = self.pool.spec.timeout if idle.requests else self.pool.spec.start_timeout
            if idle.last > limit:
                what = "request after an answer" if idle.requests else "first request"
                run.limit = Fault("timeout", f"no {what} within {limit:g} s; the program was killed")
            run.is_over = idle.total > self.episode_timeout
            if run.limit is not None or run.is_over:
                worker.submit([(None, Stop(number))], math.inf, concurrent=True)

    def _receive(self, number: int | None, outcome: Outcome) -> None:
        """End the session of a program that has ended."""
        if number is None:  # the reply to `Stop`
            return
        run = self.running.pop(number)
        idle = self.sessions.idle(run.key)
        episodes = self.sessions.close(run.key)
        fault = run.limit or outcome.fault
        if run.is_over or any(episode.stop_reason is not None for episode in episodes):
            fault = None  # the program may not expect the end
        elif fault is None and not any(episode.turns for episode in episodes):
            fault = Fault("error", "the program has ended without a request to base_url")
        if fault is not None:
            self.pool.num_failures += 1
            if number not in self.repeated and not (run.limit and idle.requests):
                self.repeated.add(number)
                self.waiting.append(number)
                return
        episodes = episodes or [Episode(list(self.questions[number].messages))]
        first = episodes[0]
        first.seconds, first.fault = idle.total, fault
        if fault is None and outcome.reward is not None and any(episodes[-1].mask):
            episodes[-1].add_final_reward(outcome.reward)
        for episode in episodes:
            if fault is not None:
                episode.stop_reason = "error"
            elif episode.stop_reason is None:
                episode.stop_reason = "timeout" if run.is_over else "done"
        self.results[number] = episodes

    def _lose(self, worker: Worker[Any]) -> None:
        """Repeat the programs of a process that has ended."""
        self.pool.end(worker)
        fault = Fault("crash", f"the process that starts programs {worker.describe_exit()}")
        for number in list(self.running):
            self._receive(number, Outcome(fault=fault))

    def _describe(self) -> str:
        """Name the programs that run, those first that have sent no request for the longest time."""
        now = time.monotonic()
        idle = {number: self.sessions.idle(run.key).last for number, run in self.running.items()}
        shown = [
            f"episode {number} (has run for {now - self.running[number].since:.0f} s, "
            + (f"no request for {idle[number]:.0f} s)" if idle[number] else "waits for an answer of the policy)")
            for number in sorted(idle, key=lambda number: (-idle[number], number))[:_NUM_NAMED]
        ]
        others = f" and {len(idle) - len(shown)} more" if len(idle) > len(shown) else ""
        return f"the program {self.pool.spec.source.target} of {', '.join(shown)}{others}"
