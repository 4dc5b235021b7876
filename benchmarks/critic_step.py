"""Speed of whole steps of PPO with a critic and a reference; beside a careful loop and TRL's PPOTrainer.

    python benchmarks/critic_step.py --models 1M,4M --against bypass,careful,trl --rounds 6     # trl: after `make trl`

Prompts, responses, lengths and mini-batches are those of `ppo_step.py`: one epoch, two optimizer steps of actor and
critic each. The critic is as large as the actor, the reference is the model that the actor starts from, the KL counts
in the reward. What counts is the time for each token of a response.

- camshaft: `PPOTrainer.step` in one process; scoring runs in a process beside it.
- bypass: the same with `algorithm.rollout_correction.bypass_mode`: the log-probs of the old policy are those of the
  generation, as they are TRL's.
- apart: as bypass, with the critic on a pool of its own: two processes, which have the machine's cores to themselves,
  half of them each, instead of `--threads`.
- careful: `CarefulPPO.step`, with `transformers.generate`.
- trl: `PPOTrainer` of TRL 1.12, the last that has one, as `trl_side.py` sets it up, in an environment of its own. It
  takes the log-probs of the old policy from the generation, does not clip gradients, and scores with a module that
  takes a few sums.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paired import Case, main, serve
from ppo_step import COLUMNS, LEARNING_RATE, compared, on_prompts

BYPASS = {"algorithm.rollout_correction.bypass_mode": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "camshaft": {},
    "bypass": BYPASS,
    "apart": {
        **BYPASS,
        "trainer.resource_pools": "{critic_pool: {nnodes: 1, n_gpus_per_node: 1}}",
        "critic.resource_pool": "critic_pool",
    },
}


def build(name: str, case: Case) -> Callable[[int], dict[str, Any]]:
    """One side, ready for its rounds."""
    folder = Path(case["folder"])
    if name == "careful":
        from careful_ppo import CarefulPPO

        return on_prompts(CarefulPPO(folder, LEARNING_RATE).step, folder)
    if name == "trl":
        from trl_side import PPOSteps

        steps = PPOSteps(folder, LEARNING_RATE)
    else:
        from camshaft_side import Steps, with_critic

        if name == "apart":
            del os.environ["OMP_NUM_THREADS"]  # each process takes its part of the cores
        steps = Steps(folder, LEARNING_RATE, **with_critic(folder), **SETTINGS[name])
    return lambda number: steps.step()


BESIDE = {
    "side / bypass: CPU": "**{bypass_cpu:.2f}**",
    "side / bypass: wall": "{bypass_wall:.2f}",
    "side / apart: wall": "**{apart_wall:.2f}**",
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(build)
    else:
        both = partial(compared, script=Path(__file__).name, trl=".venv-trl-ppo", critic=True, own=("bypass", "apart"))
        main(__doc__ or "", both, COLUMNS | BESIDE, models="1M,4M", against="bypass,careful,trl")
