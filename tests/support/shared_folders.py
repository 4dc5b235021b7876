"""Folders with finished runs and other results that take seconds, one per session for all processes of pytest-xdist.

home = shared_folder("sft", lambda folder: camshaft("sft", *sft_args(folder)))      # read-only
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def shared_folder(name: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder that the first process which asks for it fills, while others wait."""
    folder = Path(os.environ["CAMSHAFT_TEST_FOLDERS"], name)
    with folder.with_suffix(".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.fstat(lock.fileno()).st_size:  # which another process may have filled since it was opened
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
            folder.mkdir()
            fill(folder)
            lock.write("filled")
    return folder
