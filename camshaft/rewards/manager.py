"""Scores a batch with the user's reward function, in processes that can be killed.

    with RewardManager(path="my_reward.py", name="compute_score", timeout=5.0, num_workers=8) as rewards:
        result = rewards.score(batch, lambda ids: tokenizer.batch_decode(ids, skip_special_tokens=True))
        batch = batch.with_columns(token_level_scores=result.token_level_scores)
        metrics |= result.metrics

        begun = rewards.begin(rows)                         # responses come one part after the other
        begun.add(0, texts)                                 # calls are made from now on
        result = rewards.score(batch, decode, begun)        # the same result, sooner

A function that raises, hangs, dies or returns something that is not a finite number costs one sample: it is counted,
shown in the log, and scored 0 (`on_error="zero"`), left out of the update (`on_error="drop"`: the result names the row,
the trainer empties its mask) or made an error (`on_error="raise"`). The scores do not depend on `num_workers`.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RewardError
from camshaft.rewards.last_token import on_last_token
from camshaft.rewards.pool import Job, Outcome, WorkerPool
from camshaft.rewards.wire import Sample, Spec

Decode = Callable[[list[list[int]]], list[str]]

COUNTS = {"error": "errors", "invalid": "invalid", "timeout": "timeouts", "crash": "crashes"}
"""The metric that counts each kind of failure."""

SLOW = 0.5
"""A call that takes this share of its time limit is listed with the failures."""

_NUM_SHOWN = 3
_NUM_LISTED = 100
_RESPONSE_CHARACTERS = 2000

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardFailure:
    """One sample that could not be scored, or was scored slowly."""

    row: int
    kind: str
    """`error`, `invalid`, `timeout`, `crash`; or `slow`."""
    data_source: Any
    message: str
    trace: str
    seconds: float
    response: str
    """The end of it."""

    def __str__(self) -> str:
        head = f"row {self.row} (data_source {self.data_source!r}): {self.kind}: {self.message}"
        return f"{head}\n{self.trace}" if self.trace else head


@dataclass(frozen=True)
class Scores:
    """What some responses are worth, row by row."""

    scores: Tensor
    """(B,) float32; without what shapes the scores for training (`overlong.py`)."""
    metrics: dict[str, float]
    """`reward/errors`, `invalid`, `timeouts`, `crashes`, `slow`; and the mean of each part of dict results."""
    failures: tuple[RewardFailure, ...]
    """Samples that failed, as many as are listed, and then those that were slow."""
    parts: tuple[dict[str, float], ...]
    """The other numbers of each row's dict result; none of a row that failed or whose result was a number."""
    answers: tuple[str | None, ...]
    """The `pred` of each row's dict result."""
    dropped: tuple[int, ...] = field(default=(), kw_only=True)
    """Rows that failed and are not to be learned from."""

    @property
    def kept(self) -> Tensor:
        """(B,) the rows that are not dropped."""
        kept = torch.ones(len(self.scores), dtype=torch.bool)
        kept[list(self.dropped)] = False
        return kept

    @property
    def num_failed(self) -> int:
        return int(sum(self.metrics[f"reward/{name}"] for name in COUNTS.values()))


@dataclass(frozen=True)
class RewardResult(Scores):
    """The scores of one batch."""

    token_level_scores: Ragged
    """float32, aligned with `responses`: the score on the last token that the policy chose, 0 elsewhere."""


class Begun:
    """Calls for responses that are still coming, made by a thread of their own.

    `RewardManager.score` takes it up and `RewardManager.close` gives it up: one of the two has to come.
    """

    def __init__(self, pool: WorkerPool, rows: DataProto, stop_at_failure: bool):
        self._rows, self._num_missing = rows, len(rows)
        self._job = Job(len(rows), stop_at_failure)
        self._done: Future[None] = Future()
        threading.Thread(target=self._run, args=(pool,), name="rewards", daemon=True).start()

    def add(self, first: int, texts: Sequence[str]) -> None:
        """The responses to the rows from `first` on; each row is added once, in any order."""
        self._num_missing -= len(texts)
        self._job.put(first, _samples(self._rows.reorder(slice(first, first + len(texts))), texts))

    def finished(self) -> Job:
        """The job, done."""
        if self._num_missing:
            raise RewardError(f"{self._num_missing} of {len(self._rows)} responses are missing")
        try:
            self._done.result()
        except BaseException:  # the user's Ctrl-C, if not the thread's own
            self.give_up()
            raise
        return self._job

    def give_up(self) -> None:
        """End what is not done; what is done stays done."""
        self._job.give_up()
        self._done.exception()

    def _run(self, pool: WorkerPool) -> None:
        try:
            pool.run(self._job)
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)


class RewardManager:
    """A reward function and the processes that it runs in. Close it, or use it as a context manager."""

    def __init__(
        self,
        path: str | None = None,
        name: str | None = None,
        reward_kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float = 30.0,
        num_workers: int = 4,
        on_error: Literal["zero", "drop", "raise"] = "zero",
        batched: bool | None = None,
    ):
        """`path` is a .py file or a module and `name` a function in it ("compute_score" if not given).

        Without `path`, `name` is one of `REWARDS`, an entry point, or `module:function`; with neither, each
        row is scored by its `data_source`. The function is loaded now, in a worker, so that a wrong path or
        a syntax error ends the run before anything else starts. `timeout` is in seconds, for one call. `batched` says
        whether that has lists of samples; None: if the function's parameters are those of batches.
        """
        if num_workers < 1 or timeout <= 0:
            raise RewardError(f"num_workers={num_workers} must be at least 1 and timeout={timeout} above 0")
        self.on_error = on_error
        chosen = name or ("compute_score" if path else "auto")
        spec = Spec(path, chosen, dict(reward_kwargs or {}), timeout, [entry for entry in sys.path if entry], batched)
        self._pool = WorkerPool(spec, num_workers)
        self._pool.check()
        self._begun: Begun | None = None

    def begin(self, rows: DataProto) -> Begun | None:
        """Take responses to `rows` (data_source, ground_truth, extra_info) as they come, for a `score` that follows.

        None for a function of batches, which is called when all are there. What was begun before is given up.
        """
        rows.require("data_source", "ground_truth")
        self._give_up()
        if not self._pool.batched:
            self._begun = Begun(self._pool, rows, self.on_error == "raise")
        return self._begun

    def score(self, batch: DataProto, decode: Decode, begun: Begun | None = None) -> RewardResult:
        """Call the function for each row of `batch` (responses, data_source, ground_truth, extra_info).

        `decode` gets the token ids of all responses and gives their texts. Where calls have `begun` for the responses
        of these rows, they are waited for instead.
        """
        batch.require("data_source", "ground_truth")
        responses = batch.ragged("responses")
        everywhere = responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool))
        chosen = batch.ragged("response_mask") if "response_mask" in batch else everywhere
        if begun is not None:
            found, self._begun = self._settled(begun.finished()), None
        else:
            texts = decode([row.tolist() for row in responses.rows()])
            if len(texts) != len(responses):
                raise RewardError(f"decode gave {len(texts)} texts for {len(responses)} responses")
            found = self.score_texts(batch, texts)
        return RewardResult(**vars(found), token_level_scores=on_last_token(found.scores, chosen))

    def score_texts(self, batch: DataProto, texts: Sequence[str]) -> Scores:
        """The same of texts, one for each row of `batch` (data_source, ground_truth, extra_info)."""
        self._give_up()
        job = Job(len(batch), stop_at_failure=self.on_error == "raise")
        job.put(0, _samples(batch, texts))
        self._pool.run(job)
        return self._settled(job)

    def _settled(self, job: Job) -> Scores:
        samples, outcomes = job.samples, job.outcomes
        failures = [_failure(row, samples[row], outcome) for row, outcome in enumerate(outcomes) if _failed(outcome)]
        if failures and self.on_error == "raise":
            raise RewardError(f"the reward function failed at {failures[0]}")
        settled = [outcome for outcome in outcomes if outcome is not None]
        limit = SLOW * self._pool.spec.timeout
        slow = [row for row, outcome in enumerate(settled) if outcome.kind == "ok" and outcome.seconds > limit]
        _warn(failures, len(settled), "are left out" if self.on_error == "drop" else "count as 0")
        scores = torch.tensor([outcome.score for outcome in settled], dtype=torch.float32)
        listed = failures + [_failure(row, samples[row], settled[row]) for row in slow[:_NUM_LISTED]]
        return Scores(
            scores=scores,
            metrics=_metrics(settled) | {"reward/slow": float(len(slow))},
            failures=tuple(listed[:_NUM_LISTED]),
            parts=tuple(outcome.parts for outcome in settled),
            answers=tuple(outcome.answer for outcome in settled),
            dropped=tuple(failure.row for failure in failures) if self.on_error == "drop" else (),
        )

    def close(self) -> None:
        """End the worker processes."""
        self._give_up()
        self._pool.close()

    def _give_up(self) -> None:
        """No worker may hold a call that nobody waits for."""
        if self._begun is not None:
            self._begun.give_up()
            self._begun = None

    def __enter__(self) -> RewardManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _samples(rows: DataProto, texts: Sequence[str]) -> list[Sample]:
    extras = rows["extra_info"] if "extra_info" in rows else [{}] * len(rows)
    return [Sample(*row) for row in zip(rows["data_source"], texts, rows["ground_truth"], extras, strict=True)]


def _failed(outcome: Outcome | None) -> TypeGuard[Outcome]:
    return outcome is not None and outcome.kind != "ok"


def _failure(row: int, sample: Sample, outcome: Outcome) -> RewardFailure:
    kind = "slow" if outcome.kind == "ok" else outcome.kind
    end = sample.solution_str[-_RESPONSE_CHARACTERS:]
    return RewardFailure(row, kind, sample.data_source, outcome.message, outcome.trace, outcome.seconds, end)


def _metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    metrics = {
        f"reward/{name}": float(sum(outcome.kind == kind for outcome in outcomes)) for kind, name in COUNTS.items()
    }
    metrics["timing_s/reward_call_max"] = max((outcome.seconds for outcome in outcomes), default=0.0)
    parts: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.parts.items():
            parts.setdefault(name, []).append(value)
    # fsum: the mean is the same to the last bit whatever the order in which dicts name their parts.
    return metrics | {f"reward/{name}/mean": math.fsum(parts[name]) / len(parts[name]) for name in sorted(parts)}


def _warn(failures: Sequence[RewardFailure], num_rows: int, become: str) -> None:
    if failures:
        shown = "\n".join(str(failure) for failure in failures[:_NUM_SHOWN])
        logger.warning(
            "%d of %d samples could not be scored and %s; the first ones:\n%s",
            *(len(failures), num_rows, become, shown),
        )
