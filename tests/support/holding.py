"""A rollout that blocks at a given call, so that a test can stop the run there.

    rollout.name=support.holding:HoldingRollout

The environment variable `HOLD` names a file with the number of the call that blocks; the call creates `<file>.reached`.
Without the file, this is the built-in rollout.
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
    """Read the number in the file, which a test may delete at any time."""
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return None
