"""Answers of the built-in rollout one by one: a row joins those that are being generated.

    with rollout.open_stream() as stream: ...       # a TorchStream; see `camshaft.rollout.stream`

Between two decode steps, the thread of the stream returns the answers that have ended and adds the rows that wait. Rows
with other sampling options than those that are generated wait until these have ended.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from camshaft.ragged import Ragged
from camshaft.rollout.base import BaseRollout, OpenRows, SamplingParams, check_finite
from camshaft.rollout.builtin.scheduler import REFILL, Scheduler
from camshaft.rollout.stream import Answer, QueuedStream, Reason, WaveRow, common_options
from camshaft.subprocesses import POLL_SECONDS

MAX_STEPS = 8
"""Number of decode steps after which a row joins, however few rows wait. Starting several rows at once is faster."""


@dataclass
class _Row:
    """A row that is generated, with the tokens that it has."""

    request: WaveRow
    number: int
    """Number of the row in the scheduler."""
    version: int
    """Version of the weights."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class TorchStream(QueuedStream):
    """A stream whose rows join and leave between decode steps."""

    def __init__(
        self,
        rollout: BaseRollout,
        open_rows: Callable[[Ragged, SamplingParams, Tensor, Ragged], OpenRows],
        scheduler: Callable[[SamplingParams], AbstractContextManager[Scheduler]],
    ):
        """`open_rows` validates rows, and `scheduler` yields a scheduler without rows."""
        self._open_rows, self._scheduler = open_rows, scheduler
        self._rows: dict[int, _Row] = {}
        """Rows of the scheduler by their number in it."""
        self._steps_waited = 0
        """Number of steps since a row has waited to join."""
        self._is_interrupted = False
        self._interrupted: list[Answer] = []
        super().__init__(rollout)

    def interrupt(self) -> list[Answer]:
        with self._changed:
            waiting, self._waiting = self._waiting, {}
            self._is_interrupted = True
            self._wait_until(lambda: self._changed.wait_for(lambda: not self._running, POLL_SECONDS))
            self._is_interrupted = False
            interrupted, self._interrupted = self._interrupted, []
            return [*interrupted, *(Answer(row_id, [], [], [], "interrupted") for row_id in waiting)]

    # -- thread of the stream ------------------------------------------------------------------------

    def _generate(self) -> bool:
        """Generate until no row of the scheduler is left. Others may have joined in the meantime."""
        if not self._wait_for_rows():
            return False
        with self._changed:
            sampling = next((common_options(row) for row in self._waiting.values()), None)
        if sampling is not None:
            self._rows = {}
            max_steps = self._rollout.config.max_model_len
            with torch.inference_mode(), self._scheduler(sampling) as scheduler, scheduler.prepared(max_steps):
                while self._update(scheduler, sampling):
                    scheduler.step()
                    self._collect(scheduler)
        return True

    def _update(self, scheduler: Scheduler, sampling: SamplingParams) -> bool:
        """Remove rows that have been closed or interrupted, and add rows that wait. Return False if none is left."""
        with self._changed:
            if self._is_stopped:
                return False
            closed = [number for number, row in self._rows.items() if row.request.row_id not in self._running]
            if closed:
                scheduler.remove(closed)
                for number in closed:
                    del self._rows[number]
            self._rollout.close_rows(self._take_closed())
            if self._is_interrupted:
                scheduler.remove(self._rows.keys())
                for row in self._rows.values():
                    del self._running[row.request.row_id]
                    self._interrupted.append(self._answer(row, "interrupted", scheduler))
                self._rows = {}
                self._changed.notify_all()
            joining = self._start(self._joining(scheduler.num_rows, sampling))
        if joining:
            self._add(scheduler, joining)
        return scheduler.num_rows > 0

    def _joining(self, num_rows: int, sampling: SamplingParams) -> list[WaveRow]:
        """Return the rows that join now, in the order in which they have arrived."""
        waiting = list(itertools.takewhile(lambda row: common_options(row) == sampling, self._waiting.values()))
        self._steps_waited = self._steps_waited + 1 if waiting else 0
        if len(waiting) < max(1, num_rows // REFILL) and self._steps_waited < MAX_STEPS:
            return []
        self._steps_waited = 0
        return waiting

    def _add(self, scheduler: Scheduler, joining: Sequence[WaveRow]) -> None:
        """Add rows to the scheduler, and end those that their earlier tokens end."""
        longest = max(row.sampling.max_tokens for row in joining)
        rows = self._open_rows(
            Ragged.from_rows([row.tokens for row in joining], torch.int64),
            replace(joining[0].sampling, max_tokens=longest),
            torch.tensor([row.seed for row in joining], dtype=torch.int64),
            Ragged.from_rows([row.generated for row in joining], torch.int64),
        )
        left = torch.tensor([row.sampling.max_tokens - len(row.generated) for row in joining])
        is_open = rows.is_open & (left > 0)
        rows = rows.select(is_open[rows.is_open].nonzero()[:, 0])
        rows = replace(rows, limits=rows.limits.minimum(left[is_open]))
        version = self._rollout.version
        for row, goes_on, finished in zip(joining, is_open.tolist(), rows.finished.tolist(), strict=True):
            if not goes_on:
                self._end(Answer(row.row_id, [], [], [], "stop" if finished else "length"))
        opened = [row for row, goes_on in zip(joining, is_open.tolist(), strict=True) if goes_on]
        if opened:
            first = scheduler.add(rows, [row.row_id for row in opened])
            self._rows |= {first + i: _Row(row, first + i, version) for i, row in enumerate(opened)}

    def _collect(self, scheduler: Scheduler) -> None:
        """Append the tokens of the last step to their rows, and end the rows that have ended."""
        for columns in scheduler.take_samples():
            for number, token, log_prob in zip(*(column.tolist() for column in columns), strict=True):
                row = self._rows[number]
                row.tokens.append(token)
                row.log_probs.append(log_prob)
        if scheduler.num_rows == len(self._rows):
            return
        live = set(scheduler.live_rows())
        for number, row in list(self._rows.items()):
            if row.tokens and number not in live:
                del self._rows[number]
                self._end(self._answer(row, "stop" if bool(scheduler.finished[number]) else "length", scheduler))

    def _answer(self, row: _Row, reason: Reason, scheduler: Scheduler) -> Answer:
        """Return the tokens of a row, which the rollout keeps for its next turn."""
        check_finite(Ragged.from_rows([row.log_probs], torch.float32))
        request = row.request
        if row.tokens and scheduler.kept is not None:  # the last token has not been computed
            computed = [*request.tokens, *request.generated, *row.tokens[:-1]]
            scheduler.kept.set_tokens(request.row_id, torch.tensor(computed))
        versions = [row.version] * len(row.tokens)
        return Answer(request.row_id, row.tokens, row.log_probs, versions, reason, scheduler.num_cached[row.number])
