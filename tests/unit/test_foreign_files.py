"""No file that camshaft has not written is deleted, truncated or overwritten, also if processes are killed.

CAMSHAFT_WORLDS=2000 python -m pytest tests/unit/test_foreign_files.py      # more random sequences

The sequences are in `support/foreign_files.py`. Each broken twin of a function of camshaft must be found.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.foreign_files import run_world

from camshaft import storage, temporary
from camshaft.checkpoint import manager
from camshaft.tracking import jsonl, samples

WORLDS = int(os.environ.get("CAMSHAFT_WORLDS", "100"))
CHUNK = 100
TWIN_WORLDS = 200
"""Number of sequences in which each broken twin must be found."""


@pytest.mark.parametrize("start", range(0, WORLDS, CHUNK))
def test_random_sequences_change_no_foreign_file(start: int) -> None:
    changes = sum(map(run_world, range(start, start + CHUNK)))
    assert changes > 100 * CHUNK  # the sequences work


def remove_all(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sweep_by_name() -> None:
    """Remove unlocked files with a prefix, and folders with an unlocked lock file, as camshaft 0.1.0 did."""
    for parent in (Path(tempfile.gettempdir()), temporary.SHARED_MEMORY):
        for path in parent.glob("camshaft-*"):
            lock = path / ".lock" if path.is_dir() else path
            if lock.is_file() and not path.is_symlink():
                with open(lock, "a") as file, contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_all(path)


@contextlib.contextmanager
def new_file_by_name(target: str | Path, durable: bool = True) -> Iterator[Path]:
    work = Path(f"{target}.unfinished")
    yield work
    storage.flush(work)
    os.replace(work, target)


def write_marker(location: str | Path, marker: str, step: int) -> None:
    storage.write_text(location, marker, str(step))


TWINS: dict[str, tuple[Any, str, Any]] = {
    "sweep by name": (temporary, "remove_leftovers", sweep_by_name),
    "sweep without the marker": (temporary, "MARKER", b""),
    "sweep of unknown files": (temporary, "_OWN_PATHS", re.compile(".*", re.DOTALL)),
    "sweep of links": (temporary, "_find_intrusion", lambda folder: None),
    "retention of whole folders": (storage, "_remove_local", remove_all),
    "names taken by force": (storage, "rename_aside", remove_all),
    "predictable temporary files": (storage, "new_file", new_file_by_name),
    "manifests without a check": (storage, "_parse_manifest", lambda *_: {"facts": {}, "files": {"a.bin": {}}}),
    "responses by name": (samples, "_remove", remove_all),
    "metrics by name": (jsonl, "rename_existing", remove_all),
    "step numbers by name": (manager, "_write_marker", write_marker),
    "no flush": (storage, "flush", lambda path: None),
}  # fmt: skip


@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_twin_is_found(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, broken = TWINS[twin]
    monkeypatch.setattr(module, name, broken)
    with pytest.raises((AssertionError, KeyError, OSError)):
        all(run_world(seed) for seed in range(TWIN_WORLDS))
