"""Python processes that are forks of this one and share its imports, so that they start in milliseconds.

monkeypatch.setattr(plan_process, "start_python", fork_python)
"""

import contextlib
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torch


def fork_python(
    arguments: Sequence[str], env: dict[str, str] | None = None, pass_fds: Sequence[int] = (), **options: Any
) -> subprocess.Popen[Any]:
    """Start the program `-m module arguments` or `-c code`, as `camshaft.subprocesses.start_python` does."""

    def run() -> NoReturn:
        """Run in the child, before it would start the interpreter. The standard streams are open already."""
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *pass_fds}:
            with contextlib.suppress(OSError):  # that of the listing is closed
                os.close(number)
        os.environ.update(env or {})
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = os.fdopen(number, "w" if number else "r")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        torch.set_num_threads(1)  # a forked process has no OpenMP threads
        status = _run_program(*arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    # Without `restore_signals`, because Python ignores SIGPIPE and SIGXFSZ from its start on.
    options |= {"start_new_session": True, "restore_signals": False, "pass_fds": pass_fds}
    return subprocess.Popen([sys.executable], preexec_fn=run, **options)


def _run_program(option: str, program: str, *arguments: str) -> int:
    """Run a module or code, and return its exit status."""
    sys.argv = [program, *arguments]
    try:
        if option == "-c":
            exec(program, {"__name__": "__main__"})
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the module has been imported
                runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
