"""A pool of vLLM servers, shared by all tests with the same model and dtype.

servers = Servers(keep=2)
rollout = servers.rollout(config)       # a rollout with the URL of a running server
servers.end()
"""

import os
from collections import Counter

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.rollout.server import ServerRollout
from camshaft.rollout.server.launch import ServerProcess

SECONDS = 600.0
"""Time limit for the start of a server on a busy machine."""
LONGEST = 1024


class Servers:
    """One server per model and dtype; beyond `keep` servers, the least used one is stopped."""

    def __init__(self, keep: int):
        os.environ.setdefault("VLLM_API_KEY", "a secret of the tests")  # also for rollouts that get the URL
        self._keep = keep
        self._running: dict[tuple[str, str], ServerProcess] = {}
        self._uses: Counter[tuple[str, str]] = Counter()

    def server(self, config: RolloutEngineConfig) -> ServerProcess:
        key = (config.model_path, config.dtype)
        process = self._running.pop(key, None)
        if process is None or process.exit_report():
            while len(self._running) >= self._keep:
                self._running.pop(min(self._running, key=lambda other: self._uses[other])).end()
            process = ServerProcess(config.model_copy(update={"max_model_len": LONGEST, "max_num_seqs": 256}), {})
            process.wait(SECONDS)
        self._running[key] = process
        self._uses[key] += 1
        return process

    def rollout(self, config: RolloutEngineConfig) -> ServerRollout:
        kwargs = {"vllm_server_base_url": self.server(config).url}
        return ServerRollout(config.model_copy(update={"engine_kwargs": kwargs | config.engine_kwargs}))

    def end(self) -> None:
        for process in self._running.values():
            process.end()
        self._running.clear()
