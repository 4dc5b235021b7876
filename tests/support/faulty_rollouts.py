"""A built-in generator that fails when a prompt contains a fault token, for rollouts in separate processes.

RolloutEngineConfig(..., engine_kwargs={"rollout": NAME})      # tests/ has to be on PYTHONPATH
rollout.generate_sequences(Ragged.from_rows([[HANGS]]), ...)
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

HOLD = "CAMSHAFT_TEST_HOLD"
"""Environment variable with the file that `BlockingRollout` and `DyingRollout` read."""
HANGS, CRASHES, EXITS, FORGETS, STARTS, PRINTS = 100, 101, 102, 103, 104, 105


class FaultyRollout(TorchRollout):
    """The built-in generator, except for prompts with one of the fault tokens above."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config)
        self._forgets = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        super().load_weights(weights, version - self._forgets)

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        first = prompts.values[0]
        if first == HANGS:
            time.sleep(1000)
        if first == CRASHES:
            raise ZeroDivisionError("boom")
        if first == PRINTS:
            raise BrokenPipeError("the reader of the output is gone")
        if first == EXITS:
            os._exit(3)
        if first == STARTS:  # a grandchild process; its id goes to the test
            sys.stdout.write(f"{subprocess.Popen(['sleep', '1000']).pid}\n")
            sys.stdout.flush()
        self._forgets = bool(first == FORGETS)
        return super().generate_sequences(prompts, sampling, seeds)


class BlockingRollout(TorchRollout):
    """Block in mid-generation while the file named by `HOLD` contains the number of the call."""

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        out = super().generate_sequences(prompts, sampling, seeds)
        hold = Path(os.environ[HOLD])
        if hold.exists() and self.version == int(hold.read_text()):
            hold.with_suffix(".pid").write_text(str(os.getpid()))
            time.sleep(1000)
        return out


class DyingRollout(TorchRollout):
    """Kill this process in a generation with the version that the file named by `HOLD` contains, as long as it exists.

    Versions before it are generated as usual.
    """

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        file = Path(os.environ[HOLD])
        if file.exists() and self.version == int(file.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate_sequences(prompts, sampling, seeds)


NAME = f"{__name__}:{FaultyRollout.__name__}"
DIES = f"{__name__}:{DyingRollout.__name__}"
HELD = f"{__name__}:{BlockingRollout.__name__}"
