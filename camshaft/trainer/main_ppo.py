"""Train with PPO and its kin.

    python -m camshaft.trainer.main_ppo data.train_files=train.parquet actor_rollout_ref.model.path=... key=value ...

All keys: `camshaft config show`; one key: `camshaft config explain KEY`. `--cfg job` prints the composed
config and starts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from camshaft.config import PPOConfig, run_with_hydra


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the config from the command line and run; returns the exit status."""
    return run_with_hydra(list(sys.argv[1:] if argv is None else argv), "ppo_trainer", PPOConfig, run_ppo)


def run_ppo(config: PPOConfig) -> int:
    """One run. Nothing heavy is imported before the config was found good."""
    from camshaft.config import batch_table, render_batch_table
    from camshaft.trainer.build import PPOParts
    from camshaft.trainer.pools import pool_specs
    from camshaft.trainer.ppo import PPOTrainer
    from camshaft.trainer.session import session

    ranks = sum(spec.world_size for spec in pool_specs(config))
    with session(config.trainer, ranks) as run, PPOParts(config) as parts:
        run.say(render_batch_table(batch_table(config, config.topology())))
        for rule, (low, high) in config.algorithm.rollout_correction.rejections():
            run.say(f"rollout_rs={rule} keeps what lies in {low:g} .. {high:g}")
        trainer = PPOTrainer(config, parts)
        saved = trainer.prepare()
        alone = config.trainer.val_only
        resumed, bar = (None, "validation") if alone else (saved, "")
        with run.tracking(config, parts.total_steps, resumed, bar) as tracking:
            stop = run.listen()
            trainer.fit(tracking, stop)
            parts.finish_saving()  # before trackers are told that the run has finished
            if stop.status:
                tracking.ending = "stopped"
    return stop.status


if __name__ == "__main__":
    sys.exit(main())
