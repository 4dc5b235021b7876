"""Process between a worker and its owner, which ends all processes that the worker leaves.

    python -m camshaft.workers.guard MODULE LIFELINE ARGUMENTS...        # LIFELINE is a file descriptor

The process forks before it imports anything else. The child is the worker, which calls `main(*ARGUMENTS)` of MODULE.
The parent is the guard. On Linux, the guard is a subreaper: a process below it whose parent ends becomes a child of
the guard, even if it has a session of its own. The guard therefore has all processes of the worker below it at any
time, reaps those without another parent, and kills them when

- the worker has ended in any way,
- its owner writes to the pipe LIFELINE, or
- the owner has ended, which closes the pipe. The worker then has `EXIT_SECONDS` to exit.

The guard exits as the worker did, with the same code or by the same signal, but by the signal `KILLED` if the worker
was killed. It ignores signals, and the worker is not in its process group. If it is killed nevertheless, the kernel
kills the worker. The owner, which sees it by SIGKILL, then kills the processes that have the environment variable
`MARK`.
"""

import ctypes
import importlib
import os
import select
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from camshaft.workers.processes import children, kill

MARK = "CAMSHAFT_WORKER"
"""Environment variable with a unique value in all processes of a worker."""
EXIT_SECONDS = 1.0
"""Time that a worker has to exit when its owner has ended."""
KILLED = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Signal by which the guard of a worker exits that was killed. Only a guard that is killed itself exits by SIGKILL."""
END_SECONDS = 5.0
"""Time limit for ending all processes. Only a process of another user, or one that waits in the kernel, exceeds it."""

_NAME = b"camshaft-guard"
_ROUND_MILLISECONDS = 20
_SET_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NAME, _SET_CHILD_SUBREAPER = 1, 4, 15, 36


class Guard:
    """The worker, a child process, and the state of its guard."""

    def __init__(self, worker: int, lifeline: int):
        self._worker, self._lifeline = worker, lifeline
        self._status: int | None = None
        """Exit status of the worker."""
        self._wakeups, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _do_nothing)  # the signal writes to the pipe

    def run(self) -> NoReturn:
        """Wait until the processes must end, end them, and exit as the worker did."""
        self._wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._worker, signal.SIGKILL)  # without /proc, the worker's group is all that is known
        deadline = time.monotonic() + END_SECONDS
        while self._reap() and time.monotonic() < deadline:
            # The ids of children stay valid until they are reaped. The children of a killed one are found next time.
            kill(children(os.getpid()))
            self._sleep()
        _exit_like(self._status)

    def _wait(self) -> None:
        """Wait until the worker has ended or must be killed. Meanwhile, reap the processes that have lost their parent.

        The statuses of other processes remain for their own parents.
        """
        poll = select.poll()
        poll.register(self._wakeups, select.POLLIN)
        poll.register(self._lifeline, select.POLLIN)
        deadline: float | None = None
        while self._reap() and self._status is None and (deadline is None or time.monotonic() < deadline):
            for source, _ in poll.poll(None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())):
                if source == self._wakeups:
                    os.read(self._wakeups, 1 << 16)
                elif os.read(self._lifeline, 1):
                    return
                else:
                    deadline = time.monotonic() + EXIT_SECONDS
                    poll.unregister(self._lifeline)

    def _reap(self) -> bool:
        """Reap the children that have ended. Return True if others are left."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._worker:
                    self._status = ended[1]
            return True
        return False

    def _sleep(self) -> None:
        """Wait until a child ends, for a short time."""
        poll = select.poll()
        poll.register(self._wakeups, select.POLLIN)
        if poll.poll(_ROUND_MILLISECONDS):
            os.read(self._wakeups, 1 << 16)


def main(module: str, lifeline: int, arguments: list[str]) -> None:
    """Fork. Run the module in the child, and guard it in the parent, which does not return."""
    fork_guarded(lifeline)
    importlib.import_module(module).main(*arguments)


def fork_guarded(lifeline: int) -> None:
    """Fork. Return in the child, and guard it in the parent, which does not return."""
    _control(_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    worker = os.fork()
    if worker:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
        _control(_SET_NAME, _NAME)
        _close_pipes()
        Guard(worker, lifeline).run()
    os.close(lifeline)
    os.setsid()
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != guard:  # it was killed before
        os._exit(1)


def worker_code(code: int) -> int:
    """Return the exit code of a worker, which is negative for a signal, by that of its guard."""
    return -signal.SIGKILL if code == -KILLED else code


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal."""


def _close_pipes() -> None:
    """Close the pipes of the worker, whose ends must close when it ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)


def _exit_like(status: int | None) -> NoReturn:
    """Exit with the code of a status, or by its signal, or by `KILLED` instead of SIGKILL."""
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        code = -KILLED
    if code < 0:
        _control(_SET_DUMPABLE, 0)  # the worker has written a core dump, if any is wanted
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _control(option: int, value: int | bytes) -> None:
    """Call `prctl`, which exists only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(value), 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
