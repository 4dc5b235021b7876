"""A pool of SGLang rollouts, one per config, since an engine takes a minute to start.

    harness = RolloutHarness(SGLangPool(), folder)     # in place of the class

Each call returns the rollout of the config after a sleep: without weights and with an empty cache, like a new one. Two
users of one config at a time are not supported. A rollout that was evicted reports that its process has ended.
"""

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.rollout.sglang import SGLangRollout

MAX_ENGINES = 2
"""Maximum number of live engines; the processes of each take about a gigabyte."""


class SGLangPool:
    def __init__(self) -> None:
        self._rollouts: dict[str, SGLangRollout] = {}

    def __call__(self, config: RolloutEngineConfig) -> SGLangRollout:
        key = config.model_dump_json()
        if key in self._rollouts:
            self._rollouts[key].sleep()
            self._rollouts[key].wake_up()
            return self._rollouts[key]
        while len(self._rollouts) >= MAX_ENGINES:
            first, *others = self._rollouts  # most tests use the first config
            del self._rollouts[others[0] if others else first]
        self._rollouts[key] = SGLangRollout(config)
        return self._rollouts[key]
