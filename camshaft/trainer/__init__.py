"""Trainers for PPO, supervised fine-tuning and reward models.

ppo.py               PPOTrainer with the training step; read this first
async_ppo.py         AsyncPPOTrainer, which generates batches while earlier ones are learned
loop.py              TrainingLoop, which all trainers share, and `run`
build.py             PPOParts: data, rewards, worker pools and roles of a PPO run
ledger.py            which batches of an asynchronous run are drawn, sent, received and learned
advantages.py        scores, rewards, advantages and rollout correction, which are computed on the driver
scoring.py           builds the reward function and the other sources of scores
dynamic_sampling.py  samples prompts until enough of them have a learning signal (DAPO)
mini_batches.py      sharding of mini-batches over ranks, and seeds of a step
validate.py          scores and responses on held-out prompts
metrics.py           metrics of a step
schedule.py          steps at which a run saves checkpoints and validates
divergence.py        ends a run whose model has diverged
idle.py              ends a run in which nothing is trained
supervised.py        supervised fine-tuning and reward model training
generate.py          `camshaft generate`: generates responses to the prompts of a file
evaluate.py          `camshaft eval`: scores the responses in a file
check_data.py        `camshaft check-data`: checks the data and the reward function
session.py           setup shared by all trainers: logging, output folder, run length, trackers, hooks
resume.py            checks and log messages for runs that resume
main_ppo.py          `python -m camshaft.trainer.main_ppo`, equivalent to `camshaft ppo`
main_sft.py          `python -m camshaft.trainer.main_sft`, equivalent to `camshaft sft`
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from camshaft.config import PPOConfig
    from camshaft.trainer.ppo import PPOTrainer


def ppo_trainer(config: "PPOConfig") -> "type[PPOTrainer]":
    """Return the class that trains with a config: that of a pipeline if batches may be stale."""
    if config.async_training.max_staleness:
        from camshaft.trainer.async_ppo import AsyncPPOTrainer

        return AsyncPPOTrainer
    from camshaft.trainer.ppo import PPOTrainer

    return PPOTrainer
