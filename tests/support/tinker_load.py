"""`camshaft serve` in a process of its own, and many requests for samples in flight at the same time.

with server_process(folder) as server:
    statuses = sample_all(server.client(), count=64)
    server.cpu_seconds()
"""

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from camshaft.contracts.tinker.client import Client
from camshaft.models.tiny import make_tiny_model

BASE = "tiny"


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
        assert process.stdout is not None
        url, key = (process.stdout.readline().partition("=")[2].strip() for _ in range(2))
        try:
            yield ServerProcess(process.pid, url, key)
        finally:
            process.terminate()


def sample_all(client: Client, count: int, max_tokens: int = 64) -> Counter[int]:
    """Send requests for samples at once, poll all at once, and return the statuses of all requests.

    A result that is an error counts as the status 500.
    """
    sampler, statuses = client.sampler(0, base_model=BASE), Counter[int]()

    def submit(number: int) -> dict[str, str]:
        return client.submit_sample(
            sampler, number, [5, 6, 7 + number % 80], max_tokens=max_tokens, stop=[], seed=number
        )

    def poll(promise: dict[str, str]) -> list[int]:
        polled = list[int]()
        while not polled or polled[-1] == 408:
            status, content = client.poll(promise)
            polled.append(500 if content.startswith(b'{"error"') else status)
        return polled

    with ThreadPoolExecutor(count) as threads:
        promises = list(threads.map(submit, range(count)))
        statuses[200] += len(promises)
        for polled in threads.map(poll, promises):
            statuses.update(polled)
    return statuses
