"""A generator that stops a run where a test wants it: when the batch of that number is asked for.

    rollout.name=support.holding:HoldingRollout

`HOLD` in the environment names a file. Where it is there, it holds the number of the call that never ends; the call
makes `<file>.reached`. Else this is the built-in generator.
"""

import os
import time
from pathlib import Path

from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.dataproto import Ragged
from camshaft.rollout import Generation, SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

HOLD = "CAMSHAFT_TEST_HOLD"
NAME = f"{__name__}:HoldingRollout"


class HoldingRollout(TorchRollout):
    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self.num_calls = 0

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        self.num_calls += 1
        file = Path(os.environ.get(HOLD, "/nowhere"))
        while self.num_calls == _held(file):
            file.with_name(f"{file.name}.reached").touch()
            time.sleep(0.01)
        return super().generate_sequences(prompts, sampling, seeds)


def _held(file: Path) -> int | None:
    """The number in the file, which a test may take away at any time."""
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return None
