"""Answers of a rollout one by one: rows come and go while others are generated.

    with open_stream(rollout) as stream:
        stream.put(7, prompt, SamplingParams(64), seed=1)             # from any thread
        (answer,) = stream.take(timeout=10.0)
        stream.put(7, prompt + answer.tokens + told, SamplingParams(64), seed=1)    # the next turn of the same row
        stream.close(7)

A stream belongs to one rollout, which nobody else uses while the stream is open. A background thread runs the rollout.
The tokens of an answer depend on its row only. `WaveStream` works with any rollout, by calls of `generate_sequences`: a
row waits for the answers of the call in progress. A rollout with a method `open_stream` has a stream of its own, such
as the built-in one, in which a row joins those that are being generated.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from threading import Condition, Thread
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch

from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, SamplingParams
from camshaft.rollout.sampling import restart_seeds
from camshaft.subprocesses import NO_LIMIT, POLL_SECONDS, Wait

RowId = int | str
"""Name of a row, chosen by the caller."""
Reason = Literal["stop", "length", "interrupted"]
"""`stop`: a stop token or stop string has ended the answer. `length`: a length limit has. `interrupted`: a call has."""

GATHER_SECONDS = 0.002
"""Time without a new row after which a wave begins."""


class Answer(NamedTuple):
    """The new tokens of a row."""

    row_id: RowId
    tokens: list[int]
    """Tokens behind those that were passed as `generated`."""
    log_probs: list[float]
    versions: list[int]
    """Version of the weights that sampled each token."""
    reason: Reason
    num_cached: int = 0
    """Number of tokens of the context that had been computed and kept for an earlier answer of the row."""


class Stream(ABC):
    """Generates the answers of rows that join and leave at any time. Methods may be called from any thread."""

    @abstractmethod
    def put(
        self, row_id: RowId, tokens: Sequence[int], sampling: SamplingParams, seed: int, generated: Sequence[int] = ()
    ) -> None:
        """Request an answer: the first one of a new row, or the next one of a row whose last answer has been taken.

        `tokens` is the whole context of the answer. That of a later turn begins with the context and the answer before,
        which the stream may have kept. `seed` is that of the row in all turns. Where the numbers of a rollout are not a
        function of seed and position, the stream mixes it with the position of the answer behind the first context.

        `generated` continues an interrupted answer with the tokens that it has. Penalties, stop strings and
        `max_tokens` apply to them and to the new tokens together.

        Raise RolloutError if the rollout has failed or does not support `sampling`.
        """

    @abstractmethod
    def take(self, timeout: float) -> list[Answer]:
        """Return the answers that have ended since the last call, after at most `timeout` seconds without one.

        Raise RolloutError if the rollout has failed.
        """

    @abstractmethod
    def interrupt(self) -> list[Answer]:
        """Stop the answers that have not ended, and return them with the tokens that they have.

        `take` still returns those that have ended. The rows remain, and `put` with `generated` continues them.
        """

    @abstractmethod
    def close(self, row_id: RowId) -> None:
        """Remove a row. An answer that has not been taken is dropped. Unknown rows are ignored."""

    @abstractmethod
    def stop(self) -> None:
        """Remove all rows, and wait until the rollout is free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@runtime_checkable
class Streaming(Protocol):
    """A rollout with a stream of its own."""

    def open_stream(self) -> Stream: ...


def open_stream(rollout: BaseRollout) -> Stream:
    """Return the stream of a rollout, or waves of its calls if it has none of its own."""
    return rollout.open_stream() if isinstance(rollout, Streaming) else WaveStream(rollout)


class WaveRow(NamedTuple):
    """A requested answer."""

    row_id: RowId
    tokens: list[int]
    """Context of the answer."""
    sampling: SamplingParams
    seed: int
    """Seed of the row in all turns."""
    position: int
    """Number of tokens between the first context of the row and this answer."""
    generated: Sequence[int] = ()
    """Tokens of an interrupted answer that continues."""


def generate_wave(rollout: BaseRollout, wave: Sequence[WaveRow]) -> list[Answer]:
    """Generate the answers of rows whose sampling options differ in `max_tokens` only, in one call.

    The call has the limit of the longest answer. Others are cut, which gives the tokens of a call with their own limit.
    """
    contexts = Ragged.from_rows([row.tokens for row in wave], torch.int64)
    seeds = torch.tensor([row.seed for row in wave], dtype=torch.int64)
    if not rollout.capabilities.continues_rows:
        seeds = restart_seeds(seeds, torch.tensor([row.position for row in wave]))
    sampling = replace(wave[0].sampling, max_tokens=max(row.sampling.max_tokens for row in wave))
    options: dict[str, Any] = {}
    if any(row.generated for row in wave):
        options["generated"] = Ragged.from_rows([row.generated for row in wave], torch.int64)
    if rollout.capabilities.keeps_rows:
        options["row_ids"] = [row.row_id for row in wave]
    version = rollout.version
    out = rollout.generate_sequences(contexts, sampling, seeds, **options)
    answers: list[Answer] = []
    cached = [0] * len(wave) if out.num_cached is None else out.num_cached.tolist()
    columns = out.responses.rows(), out.log_probs.rows(), out.finished.tolist()
    for row, num_cached, ids, log_probs, finished in zip(wave, cached, *columns, strict=True):
        limit = max(0, row.sampling.max_tokens - len(row.generated))
        tokens = ids[:limit].tolist()
        reason: Reason = "stop" if finished and len(ids) <= limit else "length"
        versions = [version] * len(tokens)
        answers.append(Answer(row.row_id, tokens, log_probs[:limit].tolist(), versions, reason, num_cached))
    return answers


class QueuedStream(Stream):
    """A stream whose thread takes rows from a queue."""

    def __init__(self, rollout: BaseRollout):
        self._rollout = rollout
        self._changed = Condition()
        self._first_lengths: dict[RowId, int] = {}
        """Length of the first context of each row."""
        self._waiting: dict[RowId, WaveRow] = {}
        self._running: dict[RowId, WaveRow] = {}
        self._ended: dict[RowId, Answer] = {}
        self._closed: list[RowId] = []
        """Closed rows of which the rollout may keep something."""
        self._error: BaseException | None = None
        self._is_stopped = False
        # A new thread starts on device 0.
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._thread = Thread(target=self._run, name="rollout stream", daemon=True)
        self._thread.start()

    @abstractmethod
    def _generate(self) -> bool:
        """Generate answers to rows that wait; return False after `stop`. The thread of the stream calls it."""

    def put(
        self, row_id: RowId, tokens: Sequence[int], sampling: SamplingParams, seed: int, generated: Sequence[int] = ()
    ) -> None:
        with self._changed:
            self._check_usable()
            self._rollout.check_sampling(sampling)
            if row_id in self._waiting or row_id in self._running or row_id in self._ended:
                raise RolloutError(f"row {row_id} has an answer that has not been taken; take it before its next turn")
            position = len(tokens) - self._first_lengths.setdefault(row_id, len(tokens))
            self._waiting[row_id] = WaveRow(row_id, list(tokens), sampling, seed, position, list(generated))
            self._changed.notify_all()

    def take(self, timeout: float) -> list[Answer]:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._error or self._is_stopped, timeout)
            answers, self._ended = list(self._ended.values()), {}
            if not answers:
                self._check_usable()
            return answers

    def close(self, row_id: RowId) -> None:
        with self._changed:
            for rows in (self._first_lengths, self._waiting, self._running, self._ended):
                rows.pop(row_id, None)
            self._closed.append(row_id)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

        def has_ended() -> bool:
            self._thread.join(POLL_SECONDS)
            return not self._thread.is_alive()

        self._wait_until(has_ended)

    def _wait_until(self, has_ended: Callable[[], bool]) -> None:
        """Poll until the thread has reacted, and log a long wait."""
        wait = Wait("rollout stream", RolloutError, NO_LIMIT)
        while not has_ended():
            wait.check(lambda: f"the model, which generates {len(self._running)} rows")
        wait.finish()

    def _check_usable(self) -> None:
        if self._error is not None:
            raise RolloutError(f"the rollout has failed: {self._error}") from self._error
        if self._is_stopped:
            raise RolloutError("the stream of the rollout has been stopped; open a new one")

    # -- thread of the stream ------------------------------------------------------------------------

    def _run(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)
        try:
            while self._generate():
                pass
            self._closed += self._first_lengths
            self._rollout.close_rows(self._take_closed())
        except BaseException as error:  # raised by `take`
            with self._changed:
                self._error = error
                self._running = {}
                self._changed.notify_all()

    def _take_closed(self) -> list[RowId]:
        with self._changed:
            closed, self._closed = self._closed, []
        return closed

    def _wait_for_rows(self) -> bool:
        """Wait until rows wait and no others arrive. Return False after `stop`."""
        with self._changed:
            while not self._is_stopped:
                self._changed.wait_for(lambda: self._waiting or self._is_stopped)
                count = len(self._waiting)
                self._changed.wait(GATHER_SECONDS)
                if self._waiting and len(self._waiting) == count:
                    return not self._is_stopped
            return False

    def _start(self, rows: Iterable[WaveRow]) -> list[WaveRow]:
        """Move rows from those that wait to those that run."""
        started = list(rows)
        for row in started:
            self._running[row.row_id] = self._waiting.pop(row.row_id)
        return started

    def _end(self, answer: Answer) -> None:
        """Let `take` return an answer, unless its row has been closed."""
        with self._changed:
            if self._running.pop(answer.row_id, None) is not None:
                self._ended[answer.row_id] = answer
            self._changed.notify_all()


class WaveStream(QueuedStream):
    """A stream over any rollout. All requests that wait are generated by one call, and later ones by the next."""

    def interrupt(self) -> list[Answer]:
        """Return the answers that no call has begun. A call in progress ends, and `take` returns its answers."""
        with self._changed:
            waiting, self._waiting = self._waiting, {}
            self._wait_until(lambda: self._changed.wait_for(lambda: not self._running, POLL_SECONDS))
            return [Answer(row_id, [], [], [], "interrupted") for row_id in waiting]

    def _generate(self) -> bool:
        if not self._wait_for_rows():
            return False
        with self._changed:
            options = next((common_options(row) for row in self._waiting.values()), None)
            wave = self._start([row for row in self._waiting.values() if common_options(row) == options])
        self._rollout.close_rows(self._take_closed())
        for answer in generate_wave(self._rollout, wave) if wave else ():
            self._end(answer)
        return True


def common_options(row: WaveRow) -> SamplingParams:
    """Return the sampling options of a row that all rows of a call share, which are those without its limit."""
    return replace(row.sampling, max_tokens=1)
