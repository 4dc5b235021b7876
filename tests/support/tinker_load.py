"""`camshaft serve` in a process of its own, and many requests for samples in flight at the same time.

with server_process(folder) as server:
    statuses = sample_all(server.client(), count=64)
    server.cpu_seconds()

All waits have a time limit.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from camshaft.contracts.tinker.client import Client
from camshaft.models.tiny import make_tiny_model
from camshaft.subprocesses import Limit, Wait, run_in_thread

BASE = "tiny"
START_SECONDS = 240.0
"""Time limit for a server to start on a machine that is busy with other tests."""
END_SECONDS = 60.0
RESULT_SECONDS = 240.0
"""Time limit for all results of `sample_all`."""


@dataclass
class ServerProcess:
    """A server of the command line."""

    pid: int
    url: str
    key: str

    def client(self) -> Client:
        return Client(self.url, self.key, BASE).open()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the server without its worker."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server_process(folder: Path) -> Iterator[ServerProcess]:
    """Run a server with a tiny model."""
    model = make_tiny_model(folder / "model", tie_embeddings=False)
    command = [sys.executable, "-m", "camshaft", "serve", f"model={BASE}={model}", "port=0", "device=cpu"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            url, key = _address(process)
            yield ServerProcess(process.pid, url, key)
            process.terminate()
            _wait_for_end(process)
        finally:
            process.kill()


def _address(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the URL and the key that the server prints when it is ready."""
    assert process.stdout is not None
    lines = process.stdout
    wait = Wait("start", TimeoutError, Limit(START_SECONDS, f"START_SECONDS={START_SECONDS:g}"))
    url, key = run_in_thread(lambda: (lines.readline(), lines.readline()), wait, lambda: "the URL of `camshaft serve`")
    assert key, "`camshaft serve` has ended before it printed its URL and its key"
    return url.partition("=")[2].strip(), key.partition("=")[2].strip()


def _wait_for_end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"`camshaft serve` did not end within {END_SECONDS:g} s after SIGTERM") from error


def sample_all(client: Client, count: int, max_tokens: int = 64) -> Counter[int]:
    """Send requests for samples at once, poll all at once, and return the statuses of all requests.

    A result that is an error counts as the status 500.
    """
    sampler, statuses = client.sampler(0, base_model=BASE), Counter[int]()
    deadline = time.monotonic() + RESULT_SECONDS

    def submit(number: int) -> dict[str, str]:
        return client.submit_sample(
            sampler, number, [5, 6, 7 + number % 80], max_tokens=max_tokens, stop=[], seed=number
        )

    def poll(promise: dict[str, str]) -> list[int]:
        polled = list[int]()
        while not polled or polled[-1] == 408:
            if time.monotonic() > deadline:
                name = promise["request_id"]
                raise TimeoutError(f"the sample {name} of {count} was not answered within {RESULT_SECONDS:g} s")
            status, content = client.poll(promise)
            polled.append(500 if content.startswith(b'{"error"') else status)
        return polled

    with ThreadPoolExecutor(count) as threads:
        promises = list(threads.map(submit, range(count)))
        statuses[200] += len(promises)
        for polled in threads.map(poll, promises):
            statuses.update(polled)
    return statuses
