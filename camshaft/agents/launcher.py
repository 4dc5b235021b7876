"""Process that starts programs: each runs in a process of its own, which a guard ends with all processes below it.

`camshaft.workers` starts it and exchanges the messages; `jobs.py` describes their contents. A function is loaded once.
For each episode, the process forks a guard, and the guard forks the process that calls the function or becomes the
command. What the program prints goes to the output of this process; that of a command is also searched for its reward.
"""

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from camshaft.agents.environment import Fault
from camshaft.agents.host import fault_of
from camshaft.agents.jobs import (
    KEY_VARIABLE,
    URL_VARIABLE,
    Job,
    Outcome,
    Program,
    ProgramSpec,
    Stop,
    checked_result,
    kept_variables,
    last_reward,
    load_program,
    row_json,
)
from camshaft.agents.messages import Loaded
from camshaft.errors import CamshaftError
from camshaft.subprocesses import STOP_SIGNALS, extend_import_path
from camshaft.workers import guard, processes
from camshaft.workers.child import Parent, event_loop

MARK = "CAMSHAFT_PROGRAM"
"""Environment variable with a unique value in the processes of a program, for those whose guard has been killed."""
MAX_RESULT_BYTES = 64 * 1024
"""Number of bytes at the end of a command's output that are searched for its reward."""


def main(stack_file: str) -> None:
    """Serve requests until the pool closes standard input. Write stacks to the descriptor `stack_file` on request."""
    parent = Parent(int(stack_file))
    spec: ProgramSpec | None = parent.get()
    if spec is None:
        return
    try:
        extend_import_path(spec.sys_path)
        program = load_program(spec.source, pickle.loads)  # from the pipe of the pool, never from a file
        columns = program.columns()
    except BaseException as error:
        parent.ready(Loaded(str(error) if isinstance(error, CamshaftError) else _loading_error(spec, error)))
        return
    parent.ready(Loaded(None, *columns))
    launcher = Launcher(program)
    parent.serve(_only_concurrent, launcher.answer)


def _loading_error(spec: ProgramSpec, error: BaseException) -> str:
    return f"{spec.source.target} could not be loaded:\n{fault_of(error)}"


def _only_concurrent(payload: Any) -> NoReturn:
    raise AssertionError("programs run at the same time")


class Launcher:
    """The programs that run."""

    def __init__(self, program: Program):
        self._program = program
        self._running: dict[int, _Running] = {}
        event_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    async def answer(self, request: Job | Stop) -> Outcome:
        """Run the program of an episode to its end, or kill it."""
        if isinstance(request, Stop):
            if request.number in self._running:
                self._running[request.number].stop()
            return Outcome()
        try:
            running = self._running[request.number] = _Running(self._program, request)
        except OSError as error:  # too many processes or open files
            return Outcome(fault=Fault("error", f"the program could not be started: {error}"))
        try:
            status = await running.status
        finally:
            del self._running[request.number]
        try:
            return _outcome(running.finish(), status, is_command=self._program.function is None)
        except Exception as error:  # the program can write anything, and the pool waits for a reply
            return Outcome(fault=fault_of(error))

    def _reap(self) -> None:
        for running in list(self._running.values()):
            running.reap()


class _Running:
    """A program, known by its guard."""

    def __init__(self, program: Program, job: Job):
        self._loop, self.status = event_loop(), event_loop().create_future()
        self._is_command, self._mark = program.function is None, os.urandom(16).hex()
        self._lines = b""
        descriptors: list[int] = []
        try:
            descriptors += os.pipe()
            descriptors += os.pipe()
            self._pid = os.fork()
        except OSError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        self._results, results, lifeline, self._lifeline = descriptors
        if not self._pid:
            # The mark of the worker finds the program if the guard of this process is killed.
            marks = {MARK: self._mark, guard.MARK: os.environ[guard.MARK]}
            _start(program, job, lifeline, results, {**kept_variables(os.environ), **marks})
        os.close(results)
        os.close(lifeline)
        os.set_blocking(self._results, False)
        self._loop.add_reader(self._results, self._read)

    def stop(self) -> None:
        """Let the guard end all processes. If it has been killed or does not answer, end them here."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._lifeline, b"!")
        self._loop.call_later(guard.END_SECONDS, self._kill)

    def _kill(self) -> None:
        if not self.status.done():
            processes.kill([self._pid])

    def reap(self) -> None:
        """Note the end of the guard."""
        if not self.status.done():
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.status.set_result(os.waitstatus_to_exitcode(status))

    def finish(self) -> bytes:
        """Close the pipes, end what a killed guard has left, and return the end of what the program has written."""
        self._read()
        self._loop.remove_reader(self._results)
        os.close(self._results)
        os.close(self._lifeline)
        if self.status.result() == -signal.SIGKILL:
            processes.kill_marked(f"{MARK}={self._mark}")
        return self._lines

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._results, 1 << 16):
                self._lines = (self._lines + data)[-MAX_RESULT_BYTES:]
                if self._is_command:
                    os.write(2, data)
            self._loop.remove_reader(self._results)


def _outcome(lines: bytes, status: int, is_command: bool) -> Outcome:
    """Return the outcome of a program from the end of what it has written, and its exit status."""
    written: dict[str, Any] = {} if is_command or not lines else json.loads(lines)
    if "fault" in written:
        return Outcome(fault=Fault(*written["fault"]))
    code = guard.worker_code(status)
    if code < 0:
        name = signal.strsignal(-code)
        return Outcome(fault=Fault("crash", f"the program was killed by signal {-code} ({name})"))
    if code or not (written or is_command):
        return Outcome(fault=Fault("error", f"the program exited with code {code}"))
    return Outcome(last_reward(lines) if is_command else written["reward"])


# -- in the process of the program ----------------------------------------------------------------


def _start(program: Program, job: Job, lifeline: int, results: int, environment: Mapping[str, str]) -> NoReturn:
    """Run a program in a forked process, below a guard. Its result or its fault is written to the pipe `results`."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, *STOP_SIGNALS):
            signal.signal(number, signal.SIG_DFL)
        _keep_open(lifeline, results)
        guard.fork_guarded(lifeline)
        os.environ.clear()
        os.environ.update(environment, **{URL_VARIABLE: job.base_url, KEY_VARIABLE: job.api_key})
        if program.function is None:
            _execute(program, job, results)
        reward = checked_result(_call(program.function, program.arguments(job, pickle.loads(job.start))))
        _write(results, {"reward": reward})
        status = 0
    except BaseException as error:
        _write(results, {"fault": fault_of(error)})
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    result = function(**arguments)
    if not inspect.isawaitable(result):
        return result

    async def awaited() -> Any:
        return await result

    return asyncio.run(awaited())


def _execute(program: Program, job: Job, results: int) -> NoReturn:
    """Become the command, which reads the row on standard input."""
    command = program.command_line(job)
    with tempfile.TemporaryFile() as file:
        file.write(row_json(pickle.loads(job.start)).encode() + b"\n")
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.dup2(results, 1)
    os.execvp(command[0], command)


def _write(results: int, value: Mapping[str, Any]) -> None:
    data = memoryview(json.dumps(value).encode())
    while data:
        data = data[os.write(results, data) :]


def _keep_open(*descriptors: int) -> None:
    """Close all descriptors except the standard ones and some others."""
    limit = os.sysconf("SC_OPEN_MAX")
    low = 3
    for descriptor in sorted(descriptors):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, limit)
