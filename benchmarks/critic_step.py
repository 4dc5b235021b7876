"""PPO steps with a critic and a reference, compared with a careful loop and TRL's PPOTrainer.

    python benchmarks/critic_step.py --models 1M,4M --against bypass,careful,trl --rounds 6     # trl: after `make trl`

Prompts, responses, lengths and mini-batches are the same as in `ppo_step.py`: one epoch with two optimizer steps each
for actor and critic. The critic is as large as the actor, the reference is the initial actor, and the KL penalty is
part of the reward. The benchmark compares the time per response token.

- camshaft: `collect` and `step` of `PPOTrainer` in one process; scoring runs in a second process.
- bypass: with `algorithm.rollout_correction.bypass_mode`, so the generator's log-probs are the old log-probs, as in
  TRL.
- apart: as bypass, with the critic in a separate resource pool. The two processes have half of the machine's cores each
  and ignore `--threads`.
- careful: `CarefulPPO.step`, with `transformers.generate`.
- trl: `PPOTrainer` of TRL 1.12, the last version that has one, in a separate environment (`trl_side.py`). It takes the
  old log-probs from the generation, does not clip gradients, and scores with a module that computes a few sums.
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
    """Build one side; the result runs a round."""
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
            del os.environ["OMP_NUM_THREADS"]  # each process uses its share of the cores
        steps = Steps(folder, LEARNING_RATE, **with_critic(folder), **SETTINGS[name])
    return lambda number: steps.step()


compare = partial(compared, script=Path(__file__).name, critic=True)
"""Return one result row per side of this script."""
BESIDE = {
    "side / bypass: CPU": "**{bypass_cpu:.2f}**",
    "side / bypass: wall": "{bypass_wall:.2f}",
    "side / apart: wall": "**{apart_wall:.2f}**",
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(build)
    else:
        both = partial(compare, trl=".venv-trl-ppo", denominators=("bypass", "apart"))
        main(__doc__ or "", both, COLUMNS | BESIDE, models="1M,4M", against="bypass,careful,trl")
