"""Rollouts that run SGLang, one of each config for many tests: an engine takes a minute to start.

    harness = RolloutHarness(SGLangPool(), folder)     # in place of the class

Whoever asks for a config gets its rollout after a sleep, without weights and with nothing in its cache, as a new one.
Nobody may ask for one config twice at once; a rollout that was dropped for others says that its process has ended.
"""

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.rollout.sglang import SGLangRollout

MOST = 2
"""Engines alive; each has processes of about a gigabyte."""


class SGLangPool:
    def __init__(self) -> None:
        self._rollouts: dict[str, SGLangRollout] = {}

    def __call__(self, config: RolloutEngineConfig) -> SGLangRollout:
        key = config.model_dump_json()
        if key in self._rollouts:
            self._rollouts[key].sleep()
            self._rollouts[key].wake_up()
            return self._rollouts[key]
        while len(self._rollouts) >= MOST:
            first, *others = self._rollouts  # the first is of the config that most tests ask for
            del self._rollouts[others[0] if others else first]
        self._rollouts[key] = SGLangRollout(config)
        return self._rollouts[key]
