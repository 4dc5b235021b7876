"""Try a chat template in a process that can be killed, before the data is formatted with it.

    try_template(tokenizer, lambda: render(messages, tokenizer, location, True))

A template is a program in the model folder. One that never ends, or that fills the memory, would stop a run without a
message.
"""

import gc
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import CHAT_TEMPLATE_FILE

from camshaft.errors import BatchError
from camshaft.subprocesses import describe_exit, resident_memory

SECONDS = 10.0
MEMORY = 1 << 30
"""Bytes that a template may allocate."""
_OUT_OF_MEMORY = 3
"""Exit code of the process if the template exceeds `MEMORY`."""
_tried: set[str] = set()
"""Templates that this process has tried, since a run formats several data sets with the same template."""


def try_template(tokenizer: PreTrainedTokenizerBase, render: Callable[[], object], seconds: float = SECONDS) -> None:
    """Call `render`, which formats the first messages, in a fork of this process with limits of time and memory.

    Raise BatchError if it exceeds a limit. Other errors are left to the call of `render` in this process, which reports
    them with the row. Forking takes less time than importing the libraries in a new process, and is safe because the
    fork uses neither devices nor threads of this process.
    """
    template = str(tokenizer.chat_template or "")
    if not template or template in _tried:
        return
    process = multiprocessing.get_context("fork").Process(target=_render_within_limits, args=(render, seconds))
    try:
        process.start()
    except OSError:  # no memory or process for the fork; the run formats the rows without a trial
        return
    try:
        process.join(2 * seconds)  # the alarm ends it earlier, unless the process is suspended
    finally:
        process.kill()
        process.join()
    if not process.exitcode:
        _tried.add(template)
        return
    reason = {
        -signal.SIGALRM: f"takes more than {seconds:g} s",
        -signal.SIGKILL: f"takes more than {seconds:g} s",
        _OUT_OF_MEMORY: f"takes more than {MEMORY >> 30} GiB of memory",
    }.get(process.exitcode, f"ends its process with {describe_exit(process.exitcode)}")
    raise BatchError(
        f"the chat template in {_file(tokenizer)} {reason} for the messages of a single row; correct the template, or "
        "use the tokenizer of another model"
    )


def _render_within_limits(render: Callable[[], object], seconds: float) -> None:
    gc.disable()  # a collection would copy all pages that the fork shares with its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, seconds)  # ends the process even if its parent is gone
    used, (_, hard) = resident_memory(os.getpid(), "VmData"), resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    status = 0
    try:
        render()
    except MemoryError:
        status = _OUT_OF_MEMORY
    except Exception as error:  # a template can raise anything, which the call in the parent reports
        status = _OUT_OF_MEMORY if isinstance(error.__cause__, MemoryError) else 0
    os._exit(status)


def _file(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the file of the chat template in the folder of a tokenizer."""
    file = Path(tokenizer.name_or_path) / CHAT_TEMPLATE_FILE
    return str(file if file.is_file() else tokenizer.name_or_path or "the tokenizer")
