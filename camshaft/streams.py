"""Make the standard streams of a process usable, as for a daemon that starts it without them.

open_closed_streams()       # first of all, before a file is opened
"""

import os
import sys


def open_closed_streams() -> None:
    """Connect closed standard streams to /dev/null.

    The next files that the process opens would otherwise get their descriptors, and receive what its libraries and
    child processes print.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The new descriptor is the lowest free one, which is this one, because all lower ones are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
