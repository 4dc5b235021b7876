"""Order, repetitions and batches of jobs, without a role."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from camshaft.errors import WorkerError
from camshaft.service.commands import Command, CommandLog, Job, JobQueue, digest_json
from camshaft.service.errors import CommandError, Refused
from camshaft.service.futures import Future, Result


@pytest.fixture
def queue() -> Iterator[JobQueue]:
    queue = JobQueue()
    yield queue
    queue.close()


def recorded(number: int, done: list[int]) -> Command:
    def execute(_: Sequence[Job]) -> list[Result]:
        done.append(number)
        return [Result.of_json({"number": number})]

    return Command(Job(Future("s"), execute), lambda reason: Result.of_error("user", f"{number}: {reason}"))


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (2, 3, 4, 1), (4, 3, 2, 1), (2, 1, 4, 3)])
def test_commands_run_in_the_order_of_their_numbers(queue: JobQueue, order: tuple[int, ...]) -> None:
    done: list[int] = []
    log = CommandLog(queue, 60.0)
    futures = [log.submit(number, b"", lambda number=number: recorded(number, done)) for number in order]
    queue.start()
    assert all(future.wait(30.0) for future in futures)
    assert done == [1, 2, 3, 4]


def test_a_repetition_does_not_prepare_a_command(queue: JobQueue) -> None:
    done: list[int] = []
    log = CommandLog(queue, 60.0)
    first = log.submit(1, b"body", lambda: recorded(1, done))
    assert log.submit(1, b"body", lambda: pytest.fail("prepared")) is first
    with pytest.raises(Refused, match="command 1 was already sent with another body"):
        log.submit(1, b"other", lambda: recorded(1, done))
    with pytest.raises(Refused, match="seq_id=0: the commands of a model are numbered from 1"):
        log.submit(0, b"", lambda: recorded(0, done))


def test_a_gap_fails_what_waits_and_goes_on_behind_it(queue: JobQueue) -> None:
    done: list[int] = []
    log = CommandLog(queue, 0.0)
    waiting = [log.submit(number, b"", lambda number=number: recorded(number, done)) for number in (5, 3)]
    queue.start()
    log.end_gap()
    results = [future.wait(30.0) for future in waiting]
    assert all(result is not None and b"command 1 of this model did not arrive" in result.body for result in results)
    assert done == []
    with pytest.raises(Refused, match="had been given up"):
        log.submit(2, b"", lambda: recorded(2, done))
    assert log.submit(6, b"", lambda: recorded(6, done)).wait(30.0)
    assert done == [6]


def test_no_gap_ends_before_its_time(queue: JobQueue) -> None:
    done: list[int] = []
    log = CommandLog(queue, 1000.0)
    future = log.submit(2, b"", lambda: recorded(2, done))
    log.end_gap()
    assert future.is_pending
    log.submit(1, b"", lambda: recorded(1, done))
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
        (WorkerError("died\n\ntrace"), b'{"error": "died", "category": "server"}'),
        (KeyError("x"), b"KeyError: 'x'; the log of the server has the traceback"),
    ],
)
def test_an_error_is_the_result_and_the_queue_goes_on(queue: JobQueue, error: Exception, body: bytes) -> None:
    def execute(_: Sequence[Job]) -> list[Result]:
        raise error

    job, done = Job(Future("s"), execute), list[int]()
    queue.put(job)
    queue.put(recorded(1, done).job)
    queue.start()
    result = job.future.wait(30.0)
    assert result is not None
    assert result.has_failed
    assert body in result.body
    queue.close()
    assert done == [1]


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
    future.expire(1000.0)
    assert future.wait(0.0) == results[0]
    future.expire(-1.0)
    expired = future.wait(0.0)
    assert expired is not None
    assert b"is not kept any longer" in expired.body


def test_the_digest_does_not_depend_on_the_order_of_fields() -> None:
    assert digest_json("p", {"a": 1, "b": 2}) == digest_json("p", {"b": 2, "a": 1})
    assert digest_json("p", {"a": 1}) != digest_json("q", {"a": 1})
