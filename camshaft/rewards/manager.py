"""Score batches with the reward functions of the user, in isolated processes with time limits.

    with RewardManager(path="my_reward.py", name="compute_score", timeout=5.0, num_workers=8) as rewards:
        result = rewards.score(batch, lambda ids: tokenizer.batch_decode(ids, skip_special_tokens=True))
        batch = batch.with_columns(token_level_scores=result.token_level_scores)
        metrics |= result.metrics

        pending = rewards.begin(rows)                       # score responses while others are generated
        pending.add(0, texts)                               # start the calls for these rows
        result = rewards.score(batch, decode, pending)      # wait for the remaining calls

    functions = [FunctionSpec("format.py", "compute_score", label="format", weight=0.2), FunctionSpec(...)]
    RewardManager(functions=functions)                  # the score is the weighted sum of the functions

A call that raises, hangs, crashes or returns a non-finite value affects only its own sample. The failure is counted and
logged. With `on_error="zero"`, the result of the function is 0. With `on_error="drop"`, the sample is also excluded
from the update: the result lists the row, and the trainer clears its mask. With `on_error="raise"`, an error is raised.
Scores do not depend on `num_workers`.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import Any, Literal, Self

import torch
from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RewardError
from camshaft.ragged import on_last_token
from camshaft.rewards.arguments import RESPONSE
from camshaft.rewards.messages import FunctionSpec, Kind, Outcome, Sample, Spec
from camshaft.rewards.output import Output, append_rotated
from camshaft.rewards.pool import Job, WorkerPool
from camshaft.stop import Stop
from camshaft.subprocesses import NO_LIMIT, import_path, limit_waits, start_thread

Decode = Callable[[list[list[int]]], list[str]]

COUNTS = {"error": "errors", "invalid": "invalid", "timeout": "timeouts", "crash": "crashes"}
"""Kind of failure -> name of the metric that counts it."""

FAILED_REWARDS = Path("rewards", "failed.jsonl")
"""Log of failed reward calls, relative to the folder of a run."""

SLOW = 0.5
"""Calls that take longer than this fraction of the time limit are reported as slow."""

MANY_PROCESSES = 64
"""A larger number of processes that reward functions have left running is reported."""

_NUM_SHOWN = 3
_NUM_LISTED = 100
_RESPONSE_CHARACTERS = 2000

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardFailure:
    """A sample whose reward call failed or was slow."""

    row: int
    kind: str
    """`error`, `invalid`, `timeout`, `crash` or `slow`."""
    data_source: Any
    message: str
    trace: str
    seconds: float
    response: str
    """Last characters of the response text."""
    function: str = ""
    """Label of the function in a run with several functions."""

    def __str__(self) -> str:
        function = f", function {self.function!r}" if self.function else ""
        head = f"row {self.row} (data_source {self.data_source!r}{function}): {self.kind}: {self.message}"
        return f"{head}\n{self.trace}" if self.trace else head


@dataclass(frozen=True)
class Scores:
    """Scores and metrics of a batch of responses."""

    scores: Tensor
    """(B,) float32 without the overlong penalty (`overlong.py`)."""
    metrics: dict[str, float]
    """Counts (`reward/errors`, `invalid`, `timeouts`, `crashes`, `slow`), the mean of each number in `parts`, and
    statistics of each labeled function."""
    failures: tuple[RewardFailure, ...]
    """Failed samples followed by slow ones, up to a maximum number."""
    parts: tuple[dict[str, float], ...]
    """For each row, the numbers besides `score` in a dict result. Empty for other results and failed rows. A labeled
    function adds its unweighted score as `label` and these numbers as `label/number`."""
    answers: tuple[str | None, ...]
    """For each row, the extracted answer: `pred` of a dict result, or None."""
    failed: Mapping[int, str] = field(default_factory=dict, kw_only=True)
    """Maps the index of each failed row to the kind of its first failure."""
    dropped: tuple[int, ...] = field(default=(), kw_only=True)
    """Indices of failed rows that are excluded from the update."""
    unplayed: tuple[int, ...] = field(default=(), kw_only=True)
    """Indices of dropped rows that have no score, because their environment failed or their prompt is too long."""

    @property
    def keep_mask(self) -> Tensor:
        """(B,) bool mask of the rows that are not dropped."""
        mask = torch.ones(len(self.scores), dtype=torch.bool)
        mask[list(self.dropped)] = False
        return mask

    @property
    def num_failed(self) -> int:
        return len(self.failed)


@dataclass(frozen=True)
class RewardResult(Scores):
    """Scores of a batch, including token-level scores."""

    token_level_scores: Ragged
    """float32, aligned with `responses`. The last token in the response mask has the score, other tokens have 0."""


class PendingScores:
    """Reward calls that run in a background thread while other responses are still being generated.

    `RewardManager.score` collects the results. `RewardManager.close` cancels calls whose results were not collected.
    The workers make the calls of one object after those of the earlier ones.
    """

    def __init__(self, pool: WorkerPool, rows: DataProto, stop_at_failure: bool, earlier: "PendingScores | None"):
        self._rows, self._num_missing = rows, len(rows)
        self._job = Job(len(rows), pool.functions, stop_at_failure)
        self._earlier = None if earlier is None else earlier._done
        self._done = start_thread(partial(self._run, pool), "rewards")

    def add(self, first: int, texts: Sequence[str]) -> None:
        """Start the calls for consecutive rows from `first` on. Add each row once; the order does not matter."""
        self._num_missing -= len(texts)
        self._job.put(first, _samples(self._rows.reorder(slice(first, first + len(texts))), texts))

    def wait(self) -> Job:
        """Wait for all calls and return the job with their outcomes."""
        if missing := self._num_missing:
            raise RewardError(f"{missing} of {len(self._rows)} responses are missing; add them before `score`")
        try:
            self._done.result()
        except BaseException:  # an error from the thread, or KeyboardInterrupt while waiting
            self.cancel()
            raise
        return self._job

    def cancel(self) -> None:
        """Cancel unfinished calls and wait for the thread to end."""
        self._job.cancel()
        self._done.exception()

    @property
    def is_done(self) -> bool:
        return self._done.done()

    def give_way(self) -> None:
        """Wait until the workers have made the calls. Raise RewardError if responses are missing."""
        if self._num_missing and not self.is_done:
            raise RewardError(
                f"{self._num_missing} of {len(self._rows)} responses of an earlier `begin` are missing, and the "
                "workers make its calls first; add them, or cancel it, before `score`"
            )
        self._done.exception()

    def _run(self, pool: WorkerPool) -> None:
        if self._earlier is not None:
            self._earlier.exception()  # waits; the run of its calls reports a long wait
        with limit_waits(NO_LIMIT):  # the limit of a generation in the main thread does not apply
            pool.run(self._job)


class RewardManager:
    """Reward functions and their worker processes. Use it as a context manager or call `close`."""

    def __init__(
        self,
        path: str | None = None,
        name: str | None = None,
        reward_kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float = 30.0,
        num_workers: int = 4,
        functions: Sequence[FunctionSpec] = (),
        max_concurrency: int = 32,
        on_error: Literal["zero", "drop", "raise"] = "zero",
        batched: bool | None = None,
        max_abs_score: float = 1e6,
        load_timeout: float = 120.0,
        output: Path | None = None,
        stop: Stop | None = None,
        stop_timeout: float = 0.0,
        has_environments: bool = False,
    ):
        """Load the functions in a worker process. Raise RewardError on failure.

        Args:
            path: Python file or module that contains the function.
            name: Name of the function in `path`, by default "compute_score". Without `path`, a name in `REWARDS`, an
                entry point or `module:function`. With neither, `data_source` selects the function of each row.
            reward_kwargs: Additional keyword arguments of every call.
            timeout: Time limit of one call in seconds.
            num_workers: Maximum number of worker processes.
            functions: Several functions. The first three arguments and `batched` are then ignored.
            max_concurrency: Maximum number of calls of coroutine functions that run at a time.
            on_error: Handling of failed samples: "zero", "drop" or "raise".
            batched: Call the function with lists of samples. None means detect it from the parameter names.
            max_abs_score: Largest valid absolute value of a score.
            load_timeout: Time limit for loading the function in a process, in seconds.
            output: File for what the function prints. None writes the first megabyte to stderr.
            stop: Stop requests of the run.
            stop_timeout: Scoring that takes longer than this after a stop request raises ScoringAbandoned. In seconds.
            has_environments: Functions with a parameter `environments` are called by the processes of environments,
                which write the column `env_outcomes`.
        """
        if num_workers < 1 or timeout <= 0:
            raise RewardError(
                f"set num_workers={num_workers} to at least 1 and timeout={timeout} to a number greater than 0"
            )
        self.on_error = on_error
        single = FunctionSpec(path, name or ("compute_score" if path else "auto"), dict(reward_kwargs or {}), batched)
        spec = Spec(tuple(functions) or (single,), timeout, import_path(), max_abs_score, has_environments)
        self._functions = spec.functions
        stop = stop or Stop()
        self._pool = WorkerPool(spec, num_workers, max_concurrency, load_timeout, Output(output), stop, stop_timeout)
        self._pool.check()
        self._pending: list[PendingScores] = []
        """Those whose calls are not finished, in the order in which the workers make them."""
        self._many_processes = MANY_PROCESSES
        """A larger number of processes is reported. The number then doubles."""

    @property
    def names(self) -> list[str]:
        """The loaded functions for messages: `my_reward.py:digits`, or the name of a built-in function."""
        pairs = zip(self._functions, self._pool.functions, strict=True)
        return [f"{spec.path}:{info.name}" if spec.path else spec.name for spec, info in pairs]

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns of the data file that the functions read from column `data_row`; None for all columns."""
        names: list[str] = []
        for function in self._pool.functions:
            if function.columns is None:
                return None
            names += function.columns
        return tuple(dict.fromkeys(names))

    @property
    def environment_functions(self) -> Spec | None:
        """Functions that the processes of environments call; None if there are none."""
        pairs = zip(self._functions, self._pool.functions, strict=True)
        functions = tuple(function for function, info in pairs if info.takes_environments)
        return self._pool.spec._replace(functions=functions) if functions else None

    def check_rows(self, rows: DataProto) -> None:
        """Raise RewardError if the data has no column for a parameter of a function."""
        if not len(rows):
            return
        names = set(rows["data_row"][0]) if "data_row" in rows else set[str]()
        for name, info in zip(self.names, self._pool.functions, strict=True):
            for column in info.required:
                if column not in names:
                    raise RewardError(
                        f"the reward function {name} has a parameter '{column}', but the data has no column "
                        f"'{column}'. Add the column, rename the parameter, or give it a default. A reward function "
                        f"can take {RESPONSE[1]} (or {RESPONSE[0]}, {RESPONSE[2]}), prompt, ground_truth, data_source, "
                        "extra_info, and any column of the data files"
                    )
                if missing := sum(row.get(column) is None for row in rows["data_row"]):
                    logger.warning(
                        "the column '%s' has no value in %d of %d rows; the reward function %s receives None for them",
                        *(column, missing, len(rows), name),
                    )

    def begin(self, rows: DataProto) -> PendingScores:
        """Return an object that scores the responses to `rows` as they are added, after those of earlier objects.

        `rows` has the columns data_source, ground_truth and optionally extra_info. Batched functions are called when
        all responses are added.
        """
        rows.require("data_source", "ground_truth")
        self._pending = [pending for pending in self._pending if not pending.is_done]
        earlier = self._pending[-1] if self._pending else None
        self._pending.append(PendingScores(self._pool, rows, self.on_error == "raise", earlier))
        return self._pending[-1]

    def score(self, batch: DataProto, decode: Decode, pending: PendingScores | None = None) -> RewardResult:
        """Score each row of `batch`.

        The batch has the columns responses, data_source, ground_truth and optionally extra_info. `decode` converts the
        token ids of all responses to texts. If `pending` is given, wait for its calls instead of making new ones.
        """
        batch.require("data_source", "ground_truth")
        responses = batch.ragged("responses")
        all_tokens = responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool))
        mask = batch.ragged("response_mask") if "response_mask" in batch else all_tokens
        if pending is not None:
            num_earlier = self._pending.index(pending) if pending in self._pending else 0
            for earlier in self._pending[:num_earlier]:
                earlier.give_way()
            scores = self._collect(pending.wait())
        else:
            texts = decode([row.tolist() for row in responses.rows()])
            if len(texts) != len(responses):
                raise RewardError(
                    f"decode returned {len(texts)} texts for {len(responses)} responses; return one per response"
                )
            scores = self.score_texts(batch, texts)
        return RewardResult(**vars(scores), token_level_scores=on_last_token(scores.scores, mask))

    def score_texts(self, batch: DataProto, texts: Sequence[str]) -> Scores:
        """Score texts, one for each row of `batch` (columns data_source, ground_truth, optionally extra_info).

        This waits for the calls of objects that `begin` has returned.
        """
        for earlier in self._pending:
            earlier.give_way()
        job = Job(len(batch), self._pool.functions, stop_at_failure=self.on_error == "raise")
        samples = _samples(batch, texts)
        if "env_outcomes" in batch:
            job.record(samples, batch["env_outcomes"])
        job.put(0, samples)
        self._pool.run(job)
        return self._collect(job)

    def _collect(self, job: Job) -> Scores:
        rows = [_combine(self._functions, outcomes) for outcomes in zip(*job.outcomes, strict=True)]
        failures, slow = self._find_failures(job, rows)
        if failures and self.on_error == "raise":
            raise RewardError(f"the reward function failed for {failures[0]}")
        failed = {index: row.kind for index, row in enumerate(rows) if row.failed}
        zero = "count as 0" if len(self._functions) == 1 else "lack the score of a function"
        _warn(failures, len(failed), len(rows), "are dropped" if self.on_error == "drop" else zero)
        seconds = [outcome.seconds for outcomes in job.outcomes for outcome in outcomes if outcome is not None]
        metrics = _metrics(rows) | {"reward/slow": float(len(slow))}
        metrics["timing_s/reward_call_max"] = max(seconds, default=0.0)
        metrics["perf/reward_processes"] = float(self._count_processes())
        for function, outcomes in zip(self._functions, job.outcomes, strict=True):
            metrics |= _function_metrics(function.label, outcomes) if function.label else {}
        return Scores(
            scores=torch.tensor([row.score for row in rows], dtype=torch.float32),
            metrics=metrics,
            failures=tuple(failures + slow)[:_NUM_LISTED],
            parts=tuple(row.parts for row in rows),
            answers=tuple(row.answer for row in rows),
            failed=failed,
            dropped=tuple(failed) if self.on_error == "drop" else (),
        )

    def _count_processes(self) -> int:
        """Count the processes that the functions have left running. Log a warning if there are many."""
        count = self._pool.count_processes()
        if count > self._many_processes:
            logger.warning(
                "%d processes that the reward function has started are running. If perf/reward_processes grows with "
                "each step, end each process in the call that starts it; otherwise they end with the run",
                count,
            )
            self._many_processes = 2 * count
        return count

    def _find_failures(self, job: Job, rows: Sequence[Outcome]) -> tuple[list[RewardFailure], list[RewardFailure]]:
        """Return the failed calls and the slow calls, in the order of the rows."""
        failures: list[RewardFailure] = []
        slow: list[RewardFailure] = []
        slow_seconds = SLOW * self._pool.spec.timeout
        for row, outcomes in enumerate(zip(*job.outcomes, strict=True)):
            calls = [(outcome, function.label) for outcome, function in zip(outcomes, self._functions, strict=True)]
            if rows[row].failed and not any(outcome is not None and outcome.failed for outcome in outcomes):
                calls.append((rows[row], ""))  # no function returned a score
            for outcome, label in calls:
                if outcome is not None and outcome.failed:
                    failures.append(_failure(row, job.samples[row], outcome, label))
                elif outcome is not None and outcome.seconds > slow_seconds:
                    slow.append(_failure(row, job.samples[row], outcome, label))
        return failures, slow

    def close(self) -> None:
        """Cancel calls whose results were not collected, and stop the worker processes."""
        for pending in self._pending:
            pending.cancel()
        self._pending = []
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _samples(rows: DataProto, texts: Sequence[str]) -> list[Sample]:
    extras = rows["extra_info"] if "extra_info" in rows else [{}] * len(rows)
    data_rows = rows["data_row"] if "data_row" in rows else [{}] * len(rows)
    columns = zip(rows["data_source"], texts, rows["ground_truth"], extras, data_rows, strict=True)
    return [Sample(*values) for values in columns]


def _combine(functions: Sequence[FunctionSpec], outcomes: Sequence[Outcome | None]) -> Outcome:
    """Combine the outcomes of the functions for one row: the weighted sum, all numbers, and the first failure."""
    parts: dict[str, float] = {}
    terms: list[float] = []
    failed: Outcome | None = None
    answer: str | None = None
    for function, outcome in zip(functions, outcomes, strict=True):
        if outcome is None:  # the call was cancelled after the failure of another one
            continue
        failed = failed or (outcome if outcome.failed else None)
        answer = answer if answer is not None else outcome.answer
        if outcome.kind == "ok":
            terms.append(function.weight * outcome.score)
            if function.label:
                parts[function.label] = outcome.score
            parts |= {f"{function.label}/{name}" if function.label else name: v for name, v in outcome.parts.items()}
    kind: Kind = failed.kind if failed is not None else "ok" if terms else "invalid"
    noun = "the function" if len(functions) == 1 else "every function"
    return Outcome(kind, math.fsum(terms), parts, f"{noun} returned None; return a number", answer=answer)


def _failure(row: int, sample: Sample, outcome: Outcome, function: str) -> RewardFailure:
    kind = outcome.kind if outcome.failed else "slow"
    end = sample.solution_str[-_RESPONSE_CHARACTERS:]
    return RewardFailure(row, kind, sample.data_source, outcome.message, outcome.trace, outcome.seconds, end, function)


def _metrics(rows: Sequence[Outcome]) -> dict[str, float]:
    """Count the failed rows by the kind of their first failure, and average the numbers in `parts`."""
    metrics = {f"reward/{name}": float(sum(row.kind == kind for row in rows)) for kind, name in COUNTS.items()}
    parts: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.parts.items():
            parts.setdefault(name, []).append(value)
    # fsum rounds only once, so the mean does not depend on the order of the samples.
    return metrics | {f"reward/{name}/mean": math.fsum(parts[name]) / len(parts[name]) for name in sorted(parts)}


def _function_metrics(label: str, outcomes: Sequence[Outcome | None]) -> dict[str, float]:
    """Compute the statistics of the scores of one function, besides their mean, and count its failed calls."""
    scores = [outcome.score for outcome in outcomes if outcome is not None and outcome.kind == "ok"]
    failed = float(sum(outcome is not None and outcome.failed for outcome in outcomes))
    metrics = {f"reward/{label}/scored": float(len(scores)), f"reward/{label}/failed": failed}
    if scores:
        statistics = {"std": stdev(scores) if len(scores) > 1 else 0.0, "min": min(scores), "max": max(scores)}
        metrics |= {f"reward/{label}/{name}": value for name, value in statistics.items()}
    return metrics


def _warn(failures: Sequence[RewardFailure], num_failed: int, num_rows: int, consequence: str) -> None:
    if failures:
        distinct: dict[tuple[str, str], RewardFailure] = {}
        for failure in failures:
            distinct.setdefault((failure.message, failure.trace), failure)
        messages = "\n".join(map(str, list(distinct.values())[:_NUM_SHOWN]))
        logger.warning(
            "%d of %d samples could not be scored and %s, as custom_reward_function.on_error says. First failures:\n%s",
            *(num_failed, num_rows, consequence, messages),
        )


def log_failures(failures: Iterable[RewardFailure], folder: Path, when: str) -> None:
    """Append samples with failed or slow reward calls to the log in the folder of a run, as JSON lines.

    `when` describes the step. The first failure creates the file. A full file is renamed to `failed.1.jsonl`. A
    full disk causes a warning, and the run continues.
    """
    lines = [json.dumps({"when": when} | asdict(failure), default=str) + "\n" for failure in failures]
    path = folder.expanduser() / FAILED_REWARDS
    try:
        if lines:
            append_rotated(path, "".join(lines).encode())
    except OSError as error:
        logger.warning("failed samples cannot be written to %s: %s", path, error.strerror or error)
