"""The same PPO run on a cluster of two machines; see `two_machines` for what a machine is here."""

from pathlib import Path

import pytest
from support.cluster import two_machines
from support.ppo_runs import run_ppo
from support.same_run import RANKS, SHUFFLED, compare

pytestmark = pytest.mark.timeout(280)


def test_one_rank_on_each_of_two_machines_gives_the_same_numbers(tmp_path: Path) -> None:
    alone = run_ppo(tmp_path, SHUFFLED, steps=2)
    layout = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 1}
    with two_machines():
        compare(run_ppo(tmp_path, {**SHUFFLED, **RANKS, **layout}, steps=2), alone, rel=1e-6)
