"""A process between the trainer and the server that it started: whichever of the two ends, ends the other.

    python guard.py PARENT COMMAND...

It leads the process group of the server, so that everything which the server starts ends too. It is run as a file, so
that it holds next to no memory.
"""

import os
import signal
import subprocess
import sys
import time

WATCH_SECONDS = 0.2


def main(parent: int, command: list[str]) -> None:
    """Start the command; kill the group when it or the parent has ended."""
    server = subprocess.Popen(command)
    while os.getppid() == parent and server.poll() is None:
        time.sleep(WATCH_SECONDS)
    if server.returncode is not None:
        os.write(2, f"The server ended with exit code {server.returncode}.\n".encode())
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
