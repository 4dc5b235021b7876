"""`camshaft ppo`: train with PPO, GRPO and related algorithms.

    camshaft ppo data.train_files=train.parquet actor_rollout_ref.model.path=models/tiny key=value ...

`python -m camshaft.trainer.main_ppo` is the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from camshaft.cli.usage import CONFIG_OPTIONS, asks_for_help
from camshaft.config import PPOConfig, batch_table, compose, render_batch_table
from camshaft.stop import ENDED_BY_SIGNAL

USAGE = f"""\
usage: camshaft ppo key=value ...        train with PPO, GRPO and related algorithms

Required keys:
  data.train_files=FILE data.val_files=FILE                   parquet, JSON lines or CSV files
  actor_rollout_ref.model.path=FOLDER
  critic.model.path=FOLDER                                    only with algorithm.adv_estimator=gae
  actor_rollout_ref.rollout.name=torch
  trainer.n_gpus_per_node=1 trainer.device=cuda               or cpu; one process per device
  actor_rollout_ref.actor.strategy=fsdp                       or reference for a single process without sharding
All keys: camshaft config show. One key: camshaft config explain KEY

{CONFIG_OPTIONS}
example (in addition to the required keys):
  camshaft ppo ... algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.optim.lr=1e-6
"""


def main(argv: Sequence[str]) -> int:
    """Train with every config that `argv` describes, one after another, and return the largest exit status.

    If a signal stops a run, the remaining runs of a sweep are not started.
    """
    if asks_for_help(argv):
        sys.stdout.write(USAGE)
        return 0
    status = 0
    for config in compose(argv, PPOConfig):
        status = max(status, train(config))
        if status > ENDED_BY_SIGNAL:
            break
    return status


def train(config: PPOConfig) -> int:
    """Train with one config, and return the exit status."""
    from camshaft.trainer.build import PPOParts
    from camshaft.trainer.ppo import PPOTrainer
    from camshaft.trainer.session import check_libraries, pool_specs, session

    check_libraries(config)
    ranks = sum(spec.world_size for spec in pool_specs(config))
    with session(config.trainer, ranks) as run, PPOParts(config) as parts:
        run.say(render_batch_table(batch_table(config, config.topology())))
        for rule, (low, high) in config.algorithm.rollout_correction.rejection_bounds():
            run.say(f"rollout_rs={rule} accepts values from {low:g} to {high:g}")
        trainer = PPOTrainer(config, parts)
        saved = trainer.prepare()
        only_validate = config.trainer.val_only
        resumed, subfolder = (None, "validation") if only_validate else (saved, "")
        with run.tracking(config, parts.total_steps, resumed, subfolder) as tracking:
            stop = run.listen(parts.stop)
            trainer.fit(tracking, stop)
            parts.finish_saving()  # write all checkpoints before the trackers report the run as finished
            if stop.status:
                tracking.ending = "stopped"
        if stop.status:
            run.say_how_to_resume()
    return stop.status
