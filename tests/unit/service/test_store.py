"""The log of a server: errors of its thread, and results that expire."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from camshaft.service.futures import Future, Result
from camshaft.service.store import LOG, Entry, LogError, Store, add_entry, add_session, expire_result, set_result


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / LOG)
    yield store
    store.close()


def entry(number: int) -> Entry:
    return Entry("s:train:0", number, "optim_step", b"", f"f{number}", b"{}")


@pytest.mark.parametrize("number", [1, 2**63])
def test_after_an_error_nothing_is_written_and_nothing_waits(store: Store, number: int) -> None:
    store.write(add_entry(entry(1)))
    store.flush()
    called = threading.Event()
    store.write(add_entry(entry(number)), then=called.set)  # exists, or is no integer of SQLite
    with pytest.raises(LogError, match=r"log.sqlite3 cannot be written: (Integrity|Overflow)Error"):
        store.flush()
    store.write(add_entry(entry(2)), then=called.set)
    with pytest.raises(LogError):
        store.flush()
    assert not called.is_set()
    assert [found.number for found in store.entries()] == [1]
    assert store.failure is not None


def test_a_full_disk_does_not_end_the_log(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("camshaft.service.store.RETRY_SECONDS", 0.01)
    calls: list[int] = []
    connection = store._connection

    class Full:
        in_transaction = False

        def execute(self, *arguments: object) -> None:
            calls.append(1)
            store._connection = connection
            raise sqlite3.OperationalError("database or disk is full")

    store._connection = Full()  # pyright: ignore
    store.write(add_entry(entry(1)))
    store.flush()
    assert calls == [1]
    assert [found.number for found in store.entries()] == [1]


def test_an_error_in_a_delivery_does_not_end_the_log(store: Store) -> None:
    future = Future("s")
    future.resolve(Result.of_json({}))
    store.write(add_session("s", "local"), then=lambda: future.resolve(Result.of_json({})))  # a second time
    store.flush()
    assert store.sessions() == [("s", "local")]


@pytest.mark.parametrize("has_failed", [True, False])
def test_an_expired_result_does_not_change_whether_the_command_has_failed(store: Store, has_failed: bool) -> None:
    future = Future("s", ("s:train:0", 1))
    result = Result.of_error("user", "wrong") if has_failed else Result.of_json({})
    store.write(add_entry(entry(1)), set_result(future, result, keeps_content=True))
    store.write(expire_result(future))
    store.flush()
    (found,) = store.entries()
    assert found.is_expired
    assert found.result is not None
    assert found.result.has_failed is has_failed
