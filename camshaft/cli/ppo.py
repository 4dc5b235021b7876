"""`camshaft ppo`: train with PPO, GRPO and related algorithms.

    camshaft ppo model=models/tiny data=train.jsonl reward=my_reward.py algorithm=grpo key=value ...

`python -m camshaft.trainer.main_ppo` is the same command.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from camshaft.cli.usage import CONFIG_OPTIONS, algorithm_names, asks_for_help, short_name_table
from camshaft.config import PPOConfig, batch_table, compose, render_batch_table
from camshaft.stop import ENDED_BY_SIGNAL

USAGE = f"""\
usage: camshaft ppo key=value ...        train with PPO, GRPO and related algorithms

{short_name_table(PPOConfig)}

{algorithm_names()}
Short names and keys can be mixed. A run requires model and data, and reward unless a built-in function scores the data.
All keys: camshaft config show. One key: camshaft config explain KEY

{CONFIG_OPTIONS}
example:
  camshaft ppo model=models/tiny data=train.jsonl reward=my_reward.py algorithm=grpo steps=60 lr=1e-5
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
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(session(config.trainer, ranks))
        run.say_choices(config)
        parts = stack.enter_context(PPOParts(config))
        config = parts.config
        run.say(render_batch_table(batch_table(config, config.topology())))
        for rule, (low, high) in config.algorithm.rollout_correction.rejection_bounds():
            run.say(f"rollout_rs={rule} accepts values from {low:g} to {high:g}")
        trainer = PPOTrainer(parts.config, parts)
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
        elif not only_validate:
            run.say_results(parts.total_steps)
    return stop.status
