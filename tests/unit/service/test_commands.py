"""Order, repetitions and batches of jobs, without a role."""

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from camshaft.errors import WorkerError
from camshaft.service import commands
from camshaft.service.commands import Command, CommandLog, Job, JobQueue, Repetitions, digest_of
from camshaft.service.errors import CommandError, Refused
from camshaft.service.futures import Future, Futures, Result
from camshaft.service.store import LOG, Entry, Store


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    store = Store(tmp_path / LOG)
    queue = JobQueue(store)
    yield queue
    queue.close()
    store.close()


def recorded_job(number: int, done: list[int], future: Future | None = None) -> Job:
    def execute(_: Sequence[Job]) -> list[Result]:
        done.append(number)
        return [Result.of_json({"number": number})]

    return Job(future or Future("s"), execute)


def recorded_log(queue: JobQueue, done: list[int]) -> CommandLog:
    """Return a log whose commands append their numbers to a list."""

    def prepare(entry: Entry, future: Future) -> Command:
        job = recorded_job(entry.number, done, future)
        return Command(job, lambda reason: Result.of_error("user", f"{entry.number}: {reason}"))

    return CommandLog("s:train:0", queue, Futures(), prepare)


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (2, 3, 4, 1), (4, 3, 2, 1), (2, 1, 4, 3)])
def test_commands_run_in_the_order_of_their_numbers(queue: JobQueue, order: tuple[int, ...]) -> None:
    done: list[int] = []
    log = recorded_log(queue, done)
    futures = [log.submit(number, "step", b"") for number in order]
    queue.start()
    assert all(future.wait(30.0) for future in futures)
    assert done == [1, 2, 3, 4]


def test_a_repetition_is_not_admitted_again(queue: JobQueue) -> None:
    log = recorded_log(queue, [])
    first = log.submit(1, "step", b"body")
    assert log.submit(1, "step", b"body", lambda: pytest.fail("admitted")) is first
    for kind, content in (("step", b"other"), ("save", b"body")):
        with pytest.raises(Refused, match="command 1 was already sent with another body"):
            log.submit(1, kind, content)
    with pytest.raises(Refused, match="seq_id=0: the commands of a model are numbered from 1"):
        log.submit(0, "step", b"")


def test_a_gap_fails_what_waits_and_goes_on_behind_it(queue: JobQueue) -> None:
    done: list[int] = []
    log = recorded_log(queue, done)
    waiting = [log.submit(number, "step", b"") for number in (5, 3)]
    queue.start()
    log.end_gap(0.0)
    results = [future.wait(30.0) for future in waiting]
    assert all(result is not None and b"command 1 of this model did not arrive" in result.body for result in results)
    assert done == []
    with pytest.raises(Refused, match="arrived too late"):
        log.submit(2, "step", b"")
    assert log.submit(6, "step", b"").wait(30.0)
    assert done == [6]


def test_no_gap_ends_before_its_time(queue: JobQueue) -> None:
    done: list[int] = []
    log = recorded_log(queue, done)
    future = log.submit(2, "step", b"")
    log.end_gap(1000.0)
    assert future.is_pending
    log.submit(1, "step", b"")
    queue.start()
    assert future.wait(30.0)


def test_jobs_of_one_batch_are_executed_together(queue: JobQueue) -> None:
    batches: list[list[str]] = []

    def execute(jobs: Sequence[Job]) -> list[Result]:
        batches.append([job.argument for job in jobs])
        return [Result.of_json({"name": job.argument}) for job in jobs]

    keys = {"a1": "a", "b1": "b", "alone": None, "a2": "a", "b2": "b"}
    jobs = [Job(Future("s"), execute, name, key) for name, key in keys.items()]
    for job in jobs:
        queue.put(job)
    queue.start()
    results = [job.future.wait(30.0) for job in jobs]
    assert batches == [["a1", "a2"], ["b1", "b2"], ["alone"]]
    assert [result.body for result in results if result] == [b'{"name": "%s"}' % name.encode() for name in keys]


@pytest.mark.parametrize(
    ("error", "body"),
    [
        (CommandError("wrong"), b'{"error": "wrong", "category": "user"}'),
        (WorkerError("died\n\ntrace"), b"the worker process ended in each of 3 attempts: died"),
        (KeyError("x"), b"KeyError: 'x'; log.txt in the folder of the server has the traceback"),
    ],
)
def test_an_error_is_the_result_and_the_queue_goes_on(queue: JobQueue, error: Exception, body: bytes) -> None:
    def execute(_: Sequence[Job]) -> list[Result]:
        raise error

    job, done = Job(Future("s"), execute), list[int]()
    queue.put(job)
    queue.put(recorded_job(1, done))
    queue.start()
    result = job.future.wait(30.0)
    assert result is not None
    assert result.has_failed
    assert body in result.body
    while not done:
        time.sleep(0.01)


def test_sessions_take_turns(queue: JobQueue) -> None:
    done: list[int] = []
    jobs = [recorded_job(number, done, Future(session)) for number, session in enumerate("aaaabbcaa")]
    for job in jobs:
        queue.put(job)
    assert len(queue) == 9
    queue.start()
    assert all(job.future.wait(30.0) for job in jobs)
    assert ["aaaabbcaa"[number] for number in done] == list("abcabaaaa")
    assert [number for number in done if number not in (4, 5, 6)] == [0, 1, 2, 3, 7, 8]


def test_turns_of_short_commands_have_as_many_tokens_as_long_ones(queue: JobQueue) -> None:
    """Commands of a have 100 tokens. In the same time, b runs up to 100 tokens, and c, which only saves, one job."""
    done: list[int] = []
    sessions = "aaabbbbbbbcc"
    tokens = [100, 100, 100, 40, 40, 40, 60, 40, None, 40, None, None]
    jobs = [
        replace(recorded_job(number, done, Future(session)), num_tokens=count)
        for number, (session, count) in enumerate(zip(sessions, tokens, strict=True))
    ]
    for job in jobs:
        queue.put(job)
    queue.start()
    assert all(job.future.wait(30.0) for job in jobs)
    # b: 40 + 40; then 40 + 60; then 40; its next job has no tokens, and is a turn of its own.
    assert done == [0, 3, 4, 10, 1, 5, 6, 11, 2, 7, 8, 9]


def test_a_batch_takes_the_oldest_jobs_first(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_ROWS", 3)
    batches: list[str] = []

    def execute(jobs: Sequence[Job]) -> list[Result]:
        batches.append("".join(job.future.session for job in jobs))
        return [Result.of_json({})] * len(jobs)

    futures = {session: [Future(session) for _ in range(2)] for session in "cab"}
    jobs = [Job(future, execute, batch="v1") for session in "abc" for future in futures[session]]
    for job in jobs:
        queue.put(job)
    queue.start()
    assert all(job.future.wait(30.0) for job in jobs)
    assert batches == ["acc", "bab"]


def test_a_batch_takes_jobs_of_all_sessions(queue: JobQueue) -> None:
    """It counts as the turn of the session that has its first job."""
    batches: list[list[str]] = []

    def execute(jobs: Sequence[Job]) -> list[Result]:
        batches.append([job.future.session for job in jobs])
        return [Result.of_json({})] * len(jobs)

    jobs = [Job(Future("a"), execute, batch="v"), Job(Future("b"), execute), Job(Future("b"), execute, batch="v")]
    for job in jobs:
        queue.put(job)
    queue.start()
    assert all(job.future.wait(30.0) for job in jobs)
    assert batches == [["a", "b"], ["b"]]


def test_a_queue_that_is_closed_while_a_batch_gathers_executes_the_last_jobs(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "GATHER_SECONDS", 30.0)
    monkeypatch.setattr(commands, "MAX_GATHER_SECONDS", 30.0)
    done, is_waiting = list[int](), threading.Event()
    gather = queue._gather

    def gather_slowly() -> None:
        is_waiting.set()
        gather()

    monkeypatch.setattr(queue, "_gather", gather_slowly)
    queue.put(replace(recorded_job(1, done), batch="v1"))
    queue.start()
    assert is_waiting.wait(30.0)
    last = recorded_job(2, done, Future(""))
    queue.close([last])
    assert done == [2]
    assert last.future.wait(30.0)


def test_a_job_that_waits_for_others_lets_them_run(queue: JobQueue) -> None:
    done: list[int] = []
    jobs = [recorded_job(number, done, Future(session)) for number, session in enumerate("aabb")]
    jobs[0] = replace(jobs[0], is_ready=lambda: 3 in done)
    for job in jobs:
        queue.put(job)
    queue.start()
    assert all(job.future.wait(30.0) for job in jobs)
    assert done == [2, 3, 0, 1]


def test_a_job_with_too_few_results_fails_with_its_batch(queue: JobQueue) -> None:
    jobs = [Job(Future("s"), lambda _: [Result.of_json({})], batch="v1") for _ in range(2)]
    for job in jobs:
        queue.put(job)
    queue.start()
    assert all(result is not None and result.has_failed for result in (job.future.wait(30.0) for job in jobs))


def test_a_future_is_pending_until_it_is_resolved_and_then_fetched_by_all() -> None:
    future, results = Future("s"), list[Result | None]()
    assert future.wait(0.0) is None
    threads = [threading.Thread(target=lambda: results.append(future.wait(30.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    future.resolve(Result.of_json({"a": 1}))
    for thread in threads:
        thread.join(30.0)
    assert results == [Result(b'{"a": 1}')] * 3


def test_results_are_forgotten_some_time_after_they_were_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("camshaft.service.futures.time", type("Clock", (), {"monotonic": staticmethod(lambda: now)}))
    results, repetitions = Futures(), Repetitions("sample")
    names = ("pending", "unread", "kept", "first", "second")
    created = {name: results.create("s", ("s:sample:0", 1), digest=b"d", is_kept=name == "kept") for name in names}
    for number, future in enumerate(created.values()):
        repetitions.add(number, future)
        if future is not created["pending"]:
            future.resolve(Result.of_json({}))
    assert results.num_pending("s") == 1
    for name in ("pending", "kept", "first"):
        results.fetch(created[name], 0.0)
    now = 109.0
    for name in ("first", "second"):  # the first answer counts
        results.fetch(created[name], 0.0)
    now = 111.0
    assert results.expire(10.0) == [created["first"]]
    assert results.expire(10.0) == []
    identifiers = [future.identifier for future in created.values()]
    del created, future
    gc.collect()
    assert [results.find(identifier) is not None for identifier in identifiers] == [True, True, True, False, True]
    assert [repetitions.find(number, b"d") is not None for number in range(5)] == [True, True, True, False, True]
    results.forget("s")
    assert results.num_pending("s") == 0
    assert not any(map(results.find, identifiers))


def test_results_of_others_do_not_slow_a_request_down() -> None:
    results, begin = Futures(), time.perf_counter()
    for _ in range(20_000):
        results.fetch(create_result(results), 0.0)
    middle = time.perf_counter()
    for _ in range(500):
        assert results.num_pending("other") == 0
        assert results.expire(1000.0) == []
    assert time.perf_counter() - middle < (middle - begin) / 2


def create_result(results: Futures) -> Future:
    future = results.create("s")
    future.resolve(Result.of_json({}))
    return future


def test_the_digest_depends_on_the_kind_of_the_request() -> None:
    assert digest_of("p", b"a") == digest_of("p", b"a")
    assert digest_of("p", b"a") != digest_of("q", b"a")
