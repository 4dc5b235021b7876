"""Restarts of a run after a failure of its workers or machines (`trainer.max_restarts`): the command runs again.

    stop = Stop()
    with restarting(config, argv, stop):
        status = run(config, PPOTrainer.open, Extensions(stop=stop))

The process executes the same command, so its id stays, signals reach it, and its exit status is that of the run. Each
restart and its cause are in `run.json`. Restarts count until the run has saved a further step. Errors of the config,
the data or the reward, and divergence, would come back and end the run. After a stop signal, nothing restarts, so that
a scheduler can start the command again.
"""

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from camshaft import storage
from camshaft.config import PPOConfig, resume_arguments
from camshaft.errors import CamshaftError, ClusterError, GeneratorError, NoAnswerError, WorkerError, report_error
from camshaft.stop import ENDED_BY_SIGNAL, Stop
from camshaft.tracking.run_folder import INFO, RESTARTS, RunFolder, process_start

PAUSE_SECONDS, MAX_PAUSE_SECONDS = 10.0, 600.0
"""Pause before the first restart, which doubles for each further one in a row, and its limit."""
_command: list[str] = []
"""Command that replaces this process at its end."""


@atexit.register
def _execute() -> None:
    """Replace this process. Functions that libraries register later run before this one, and end their processes."""
    if _command:
        os.execv(_command[0], _command)


@contextlib.contextmanager
def restarting(config: PPOConfig, arguments: Sequence[str], stop: Stop) -> Iterator[None]:
    """Let the command run again when this process ends, if the block fails and the config allows a restart.

    If a signal has requested a stop, the run ends with the exit status of the stop instead.
    """
    from camshaft.trainer.resume import RESUME_KEYS

    trainer, folder = config.trainer, Path(config.trainer.default_local_dir).expanduser()
    found = _saved_step(folder)  # perhaps of another run
    try:
        yield
    except CamshaftError as error:
        if not is_temporary(error):
            raise
        record = RunFolder(folder).info() if folder.is_dir() else {}
        saved = _saved_step(folder)
        earlier = [restart for restart in record.get(RESTARTS, ()) if restart["saved"] == saved]
        if not _is_of_this_process(record) or len(earlier) >= trainer.max_restarts:
            raise
        report_error(error)
        if stop.requested is not None:
            stop.status = ENDED_BY_SIGNAL + stop.requested
            sys.stderr.write(f"camshaft: {stop.requested.name}: the run does not restart (exit status {stop.status})\n")
            return
        pause = min(PAUSE_SECONDS * 2 ** len(earlier), MAX_PAUSE_SECONDS)
        number = f"restart {len(earlier) + 1} of {trainer.max_restarts} since the last saved step"
        sys.stderr.write(f"camshaft: the run resumes in {pause:g} s ({number})\n")
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        restart = {"at": time.time(), "saved": saved, "pause": pause, "cause": cause}
        facts = record | {RESTARTS: [*record.get(RESTARTS, ()), restart]}
        storage.write_text(folder, INFO, json.dumps(facts, indent=1) + "\n")
        time.sleep(pause)
        added = [resume_arguments(trainer)]
        # A checkpoint of this run replaces the other start.
        if trainer.resume_mode != "auto" and saved not in (None, found):
            added += map("=".join, zip(RESUME_KEYS, ("auto", "null"), strict=True))
        _command[:] = [sys.executable, *sys.orig_argv[1:], *(word for word in added if word not in ("", *arguments))]


def _saved_step(folder: Path) -> str | None:
    """Return the step of the newest checkpoint in a folder, or None if there is none or it cannot be read."""
    from camshaft.checkpoint.manager import LATEST

    with contextlib.suppress(OSError):
        return storage.read_text(folder, LATEST)
    return None


def is_temporary(error: BaseException) -> bool:
    """Return True for the death of a process or a machine, a wait that exceeded its limit, and a broken connection.

    A cluster that is too small is temporary, because the run has had its resources before. Errors that the code of a
    role raised on a rank are not, except ConnectionError and RuntimeError. Libraries that communicate raise these, and
    so does torch, for example if the memory of a device is exhausted.
    """
    temporary = GeneratorError, NoAnswerError, ClusterError
    if isinstance(error, temporary):
        return True
    cause = error.__cause__
    is_library = isinstance(cause, (ConnectionError, RuntimeError)) and not isinstance(cause, CamshaftError)
    return isinstance(error, WorkerError) and (cause is None or is_library or isinstance(cause, temporary))


def _is_of_this_process(record: dict[str, Any]) -> bool:
    """Return True if this process has started the run, perhaps before an earlier restart."""
    pid = os.getpid()
    return record.get("pid") == pid and record.get("pid_start") == process_start(pid)
