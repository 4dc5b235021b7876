"""A rollout in which one rank returns only after a response of another rank has been scored.

    rollout.name=support.late_rank:LateRank, trainer run inside `late_rank(folder, rank)`

A run that starts scoring only after all ranks have generated never finishes. Otherwise this is the built-in rollout.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from camshaft.dataproto import Ragged
from camshaft.errors import RolloutError
from camshaft.rollout import Generation, SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

LATE = "CAMSHAFT_TEST_LATE"
"""Environment variable `<rank>:<file>`: the waiting rank, and the file that it waits for."""
NAME = f"{__name__}:LateRank"
PATIENCE = 40.0

REWARD = """
from pathlib import Path
from support import even_digits

def compute_score(data_source, solution_str, ground_truth, extra_info):
    Path({scored!r}).touch()
    if len(solution_str) % 3 == 0:
        raise ValueError(solution_str)
    return {{"score": even_digits.compute_score(data_source, solution_str, ground_truth, extra_info), "acc": 1.0}}
"""


@contextlib.contextmanager
def late_rank(folder: Path, rank: int) -> Iterator[dict[str, object]]:
    """Yield the config overrides of a run in the block; its reward function fails for some responses."""
    scored, reward = folder / "scored", folder / "late_reward.py"
    reward.write_text(REWARD.format(scored=str(scored)))
    os.environ[LATE] = f"{rank}:{scored}"
    try:
        yield {
            "actor_rollout_ref.rollout.name": NAME,
            "custom_reward_function.path": reward,
            "custom_reward_function.on_error": "drop",
        }
    finally:
        del os.environ[LATE]


class LateRank(TorchRollout):
    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        rank, file = os.environ[LATE].split(":")
        late = dist.get_rank() == int(rank)
        if late:
            Path(file).unlink(missing_ok=True)  # of the previous step, which has been scored
        dist.barrier()
        generated = super().generate_sequences(prompts, sampling, seeds)
        deadline = time.monotonic() + PATIENCE
        while late and not Path(file).exists():
            if time.monotonic() > deadline:
                raise RolloutError(f"no response of another rank was scored within {PATIENCE:g} s")
            time.sleep(0.01)
        return generated
