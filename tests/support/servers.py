"""Servers of vLLM for tests: few at a time, each used by all tests that can use it.

servers = Servers(keep=2)
rollout = servers.rollout(config)       # a rollout that was given the url of one of them
servers.end()
"""

from collections import Counter

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.rollout.server import ServerRollout
from camshaft.rollout.server.launch import ServerProcess

SECONDS = 600.0
"""So long may one take to start on a machine that is busy."""
LONGEST = 1024


class Servers:
    """One for each model and number format; when there are more than `keep`, the one used least ends."""

    def __init__(self, keep: int):
        self._keep = keep
        self._running: dict[tuple[str, str], ServerProcess] = {}
        self._uses: Counter[tuple[str, str]] = Counter()

    def launched(self, config: RolloutEngineConfig) -> ServerProcess:
        key = (config.model_path, config.dtype)
        launched = self._running.pop(key, None)
        if launched is None or launched.ended():
            while len(self._running) >= self._keep:
                self._running.pop(min(self._running, key=lambda other: self._uses[other])).end()
            launched = ServerProcess(config.model_copy(update={"max_model_len": LONGEST, "max_num_seqs": 256}), {})
            launched.wait(SECONDS)
        self._running[key] = launched
        self._uses[key] += 1
        return launched

    def rollout(self, config: RolloutEngineConfig) -> ServerRollout:
        own = {"vllm_server_base_url": self.launched(config).url}
        return ServerRollout(config.model_copy(update={"engine_kwargs": own | config.engine_kwargs}))

    def end(self) -> None:
        for launched in self._running.values():
            launched.end()
        self._running.clear()
