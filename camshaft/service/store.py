"""The log of the server in an SQLite database: sessions, samplers, commands with their results, and saved states.

    store = Store(folder / LOG)
    store.write(add_entry(entry))
    store.flush()                                    # the entry is on the disk
    store.write(set_result(key, result), then=...)   # `then` is called when the result is on the disk
    for entry in store.executed("2f9a:train:0", after=20): ...

One thread writes. It commits all that is queued as one transaction, so requests that arrive together share the time of
a flush to the disk. If the disk does not allow a transaction, for example because it is full, it is tried again until
it succeeds, and all that depends on it waits. After any other error nothing is written any more, `flush` raises, and
the server ends (`failure`).
"""

import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camshaft.errors import CamshaftError, ConfigError
from camshaft.service.futures import Future, Result, Statement

LOG = "log.sqlite3"
FORMAT = 2
"""Number of the layout of the tables."""
RETRY_SECONDS = 1.0
MAX_WRITES = 256
"""Maximum number of writes in a transaction."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (session TEXT PRIMARY KEY, owner TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samplers (
    session TEXT, number INTEGER, base_model TEXT, source TEXT, used_at REAL DEFAULT 0, PRIMARY KEY (session, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS states (model TEXT PRIMARY KEY, session TEXT, number INTEGER, is_unsaved INTEGER)
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    subject TEXT, number INTEGER, session TEXT, kind TEXT, digest BLOB, future TEXT, abandoned TEXT,
    has_failed INTEGER, is_expired INTEGER DEFAULT 0, media TEXT, result BLOB, content BLOB,
    PRIMARY KEY (subject, number)
);
CREATE INDEX IF NOT EXISTS entries_of_session ON entries (session);
"""
COLUMNS = "subject, number, kind, digest, future, abandoned, has_failed, is_expired, media, result"

logger = logging.getLogger(__name__)


class LogError(CamshaftError):
    """The log cannot be written any more, so the server has to end."""


@dataclass(frozen=True)
class Entry:
    """A numbered command of a model, where 0 creates it, or a request for samples."""

    subject: str
    """Id of the model or of the sampler."""
    number: int
    kind: str
    """Path of the request, such as optim_step."""
    digest: bytes
    future: str
    content: bytes | None
    """Body of the request. None if it is not needed any more."""
    abandoned: str | None = None
    """Reason why the command is not executed."""
    result: Result | None = None
    is_expired: bool = False
    """True if the result is empty, because it is not kept any longer."""


@dataclass(frozen=True)
class State:
    """The state of a model that the server has saved: all commands up to `number` are executed."""

    number: int
    is_unsaved: bool
    """True if no client has saved the weights of this state."""


class Store:
    """The database of one server."""

    def __init__(self, path: Path):
        self.path = path
        self.failure: str | None = None
        """Why nothing is written any more."""
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        with self._connect() as connection:
            self._create(connection)
        self._connection = self._open()
        self._connection.execute("PRAGMA synchronous = FULL")
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        self._is_closed.set()
        self._writes.put(None)
        self._thread.join()

    def write(self, *statements: Statement, then: Callable[[], object] | None = None) -> None:
        """Queue statements. They are committed together, after all earlier ones; `then` is called afterwards."""
        self._writes.put(_Write(statements, then))

    def flush(self) -> None:
        """Return when all that has been written is on the disk. Raise `LogError` if that is impossible."""
        done = threading.Event()
        self.write(then=done.set)
        done.wait()
        if self.failure is not None:
            raise LogError(self.failure)

    # -- reading ------------------------------------------------------------------------------------

    def sessions(self) -> list[tuple[str, str]]:
        """Return id and owner of each session."""
        return self._read("SELECT session, owner FROM sessions")

    def samplers(self) -> list[tuple[str, int, str, str, float]]:
        """Return session, number, base model, source of the weights (JSON) and time of the last use of each sampler."""
        return self._read("SELECT session, number, base_model, source, used_at FROM samplers")

    def entries(self) -> Iterator[Entry]:
        """Return the entries of all subjects by number. Only pending ones and creations of models have content."""
        content = "CASE WHEN result IS NULL OR number = 0 THEN content END"
        yield from map(_entry, self._read(f"SELECT {COLUMNS}, {content} FROM entries ORDER BY subject, number"))

    def executed(self, model_id: str, after: int) -> Iterator[Entry]:
        """Return the executed commands of a model behind a number, in order."""
        where = "subject = ? AND number > ? AND result IS NOT NULL"
        numbers = self._read(f"SELECT number FROM entries WHERE {where} ORDER BY number", model_id, after)
        for (number,) in numbers:  # one at a time, because bodies are large
            where = "subject = ? AND number = ?"
            yield from map(
                _entry, self._read(f"SELECT {COLUMNS}, content FROM entries WHERE {where}", model_id, number)
            )

    def state(self, model_id: str) -> State | None:
        """Return the last saved state of a model."""
        rows = self._read("SELECT number, is_unsaved FROM states WHERE model = ?", model_id)
        return State(rows[0][0], bool(rows[0][1])) if rows else None

    def _read(self, text: str, *values: Any) -> list[Any]:
        with self._connect() as connection:
            return connection.execute(text, values).fetchall()

    # -- writing ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(self._open()) as connection:
            yield connection

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=60.0, isolation_level=None, check_same_thread=False)

    def _create(self, connection: sqlite3.Connection) -> None:
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{self.path} is not the log of a server ({error}); set another folder") from error
        if version == 1:
            connection.execute("ALTER TABLE samplers ADD COLUMN used_at REAL DEFAULT 0")
        if version not in (0, 1, FORMAT):
            raise ConfigError(
                f"{self.path} has the format {version}, and this version reads {FORMAT}; install a newer version, or "
                "set another folder"
            )
        connection.executescript(SCHEMA)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        for table in ("samplers", "states", "entries"):  # of requests that were accepted while their session ended
            connection.execute(f"DELETE FROM {table} WHERE session NOT IN (SELECT session FROM sessions)")

    def _write_all(self) -> None:
        with contextlib.closing(self._connection):
            while (writes := self._take()) is not None:
                try:
                    while self.failure is None and not self._commit(writes) and not self._is_closed.wait(RETRY_SECONDS):
                        pass
                except Exception as error:
                    logger.critical("%s cannot be written, so the server ends", self.path, exc_info=True)
                    self.failure = f"{self.path} cannot be written: {type(error).__name__}: {error}"
                for write in writes:
                    if write.then is not None and (self.failure is None or not write.statements):
                        _call(write.then)

    def _take(self) -> "list[_Write] | None":
        """Wait for a write, and return it with those that are queued behind it. Return None after `close`."""
        first = self._writes.get()
        if first is None:
            return None
        writes = [first]
        with contextlib.suppress(queue.Empty):
            while len(writes) < MAX_WRITES:
                write = self._writes.get_nowait()
                if write is None:
                    self._writes.put(None)
                    break
                writes.append(write)
        return writes

    def _commit(self, writes: "list[_Write]") -> bool:
        """Execute writes as one transaction. Return False, with no change, if the disk does not allow it."""
        statements = [statement for write in writes for statement in write.statements]
        if not statements:
            return True
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for text, values in statements:
                connection.execute(text, values)
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            logger.error("the log cannot be written, and requests wait for it: %s", error)
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            return False
        return True


@dataclass(frozen=True)
class _Write:
    statements: tuple[Statement, ...]
    then: Callable[[], object] | None


def _call(function: Callable[[], object]) -> None:
    """Call a function, whose error does not concern other writes."""
    try:
        function()
    except Exception:
        logger.exception("a result cannot be delivered")


def _entry(row: Any) -> Entry:
    subject, number, kind, digest, future, abandoned, has_failed, is_expired, media, body, content = row
    result = None if body is None else Result(body, media, bool(has_failed))
    return Entry(subject, number, kind, digest, future, content, abandoned, result, bool(is_expired))


def session_of(subject: str) -> str:
    """Return the session of a model or of a sampler."""
    return subject.partition(":")[0]


def kind_of(subject: str) -> str:
    """Return `train` for a model, and `sample` for a sampler."""
    return subject.split(":")[1]


def add_session(session: str, owner: str) -> Statement:
    return "INSERT INTO sessions VALUES (?, ?)", (session, owner)


def add_sampler(session: str, number: int, base_model: str, source: str, used_at: float) -> Statement:
    return "INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?, ?)", (session, number, base_model, source, used_at)


def use_sampler(identifier: str, used_at: float) -> Statement:
    session, _, number = identifier.split(":")
    return "UPDATE samplers SET used_at = ? WHERE session = ? AND number = ?", (used_at, session, int(number))


def remove_sampler(session: str, number: int) -> Statement:
    """Remove a sampler. Its results stay until they expire."""
    return "DELETE FROM samplers WHERE session = ? AND number = ?", (session, number)


def add_entry(entry: Entry) -> Statement:
    text = "INSERT INTO entries (subject, number, session, kind, digest, future, content) VALUES (?, ?, ?, ?, ?, ?, ?)"
    session = session_of(entry.subject)
    return text, (entry.subject, entry.number, session, entry.kind, entry.digest, entry.future, entry.content)


def abandon_entry(subject: str, number: int, reason: str) -> Statement:
    return "UPDATE entries SET abandoned = ? WHERE subject = ? AND number = ?", (reason, subject, number)


def drop_content(subject: str, number: int) -> Statement:
    """Drop the content of an entry, which is then not executed again."""
    return "UPDATE entries SET content = NULL WHERE subject = ? AND number = ?", (subject, number)


def set_result(future: Future, result: Result, keeps_content: bool) -> Statement:
    """Add the result of an entry. Its content is dropped if the entry is never executed again."""
    assert future.key is not None
    content = "content" if keeps_content else "NULL"
    text = f"UPDATE entries SET result = ?, media = ?, has_failed = ?, content = {content}"
    return f"{text} WHERE subject = ? AND number = ?", (result.body, result.kind, result.has_failed, *future.key)


def expire_result(future: Future) -> Statement:
    """Drop a result that is not kept any longer. A command of a model keeps its number, and the content for replays."""
    assert future.key is not None
    if kind_of(future.key[0]) == "sample":
        return "DELETE FROM entries WHERE subject = ? AND number = ?", future.key
    return "UPDATE entries SET is_expired = 1, result = x'' WHERE subject = ? AND number = ?", future.key


def set_state(model_id: str, number: int, is_unsaved: bool) -> tuple[Statement, ...]:
    """Record a saved state. The content of the commands that it covers is dropped."""
    return (
        ("INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)", (model_id, session_of(model_id), number, is_unsaved)),
        ("UPDATE entries SET content = NULL WHERE subject = ? AND number BETWEEN 1 AND ?", (model_id, number)),
    )


def remove_session(session: str, but: Sequence[str] = ()) -> tuple[Statement, ...]:
    """Remove a session, or all of it but some models."""
    marks = ", ".join("?" * len(but))
    statements = (
        (f"DELETE FROM entries WHERE session = ? AND subject NOT IN ({marks})", (session, *but)),
        (f"DELETE FROM states WHERE session = ? AND model NOT IN ({marks})", (session, *but)),
        ("DELETE FROM samplers WHERE session = ?", (session,)),
    )
    return statements if but else (*statements, ("DELETE FROM sessions WHERE session = ?", (session,)))
