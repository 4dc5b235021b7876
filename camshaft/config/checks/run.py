"""Checks of training data, validation, learning-rate schedules, trackers and checkpoints."""

from collections.abc import Iterable, Iterator

from camshaft.config.errors import Problem, check_name
from camshaft.config.files import check_contents
from camshaft.config.schema.model import OptimSection
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.supervised import SupervisedConfig
from camshaft.config.tree import format_value
from camshaft.plugins import TRACKERS

ACTOR = "actor_rollout_ref.actor"


def check_run(config: PPOConfig) -> Iterator[Problem]:
    """Check training data, validation, schedules and checkpoints of an RL run."""
    trainer = config.trainer
    yield from _check_trackers(trainer.logger)
    yield from _check_training(config)
    if not config.data.val_files and (trainer.val_before_train or trainer.val_only or trainer.test_freq != -1):
        related = ("trainer.val_before_train", "trainer.test_freq", "trainer.val_only")
        off = ["trainer.val_only=false"] * trainer.val_only + ["trainer.val_before_train=false", "trainer.test_freq=-1"]
        message = f"validation requires prompts. Set data.val_files, or disable validation with {' '.join(off)}."
        yield Problem("data.val_files", None, message, related)
    if trainer.total_training_steps is not None and not trainer.val_only:
        yield from check_critic_warmup(trainer.critic_warmup, trainer.total_training_steps)
    actor, critic, steps = config.actor_rollout_ref.actor, config.critic, trainer.total_training_steps
    yield from _check_warmup(f"{ACTOR}.optim", actor.optim, steps, trainer.critic_warmup)
    if config.needs_critic():
        yield from _check_warmup("critic.optim", critic.optim, steps)
    yield from check_contents(f"{ACTOR}.checkpoint", actor.checkpoint)
    if config.needs_critic():
        yield from check_contents("critic.checkpoint", critic.checkpoint)


def check_supervised_run(config: SupervisedConfig) -> Iterator[Problem]:
    """Check training data, validation, schedule and checkpoints of a supervised run."""
    yield from _check_trackers(config.trainer.logger)
    yield from _check_training(config)
    if not config.data.val_files and config.trainer.test_freq != -1:
        message = "validation requires data. Set data.val_files, or trainer.test_freq=-1."
        yield Problem("data.val_files", None, message, ("trainer.test_freq",))
    yield from _check_warmup("optim", config.optim, config.trainer.total_training_steps)
    yield from check_contents("checkpoint", config.checkpoint)


def check_critic_warmup(warmup: int, total_steps: int) -> Iterator[Problem]:
    """Check that the actor is trained after the critic warm-up. The trainer repeats the check for a run of epochs."""
    if warmup >= total_steps:
        message = (
            f"the first {warmup} iterations train only the critic, and the run has {total_steps}, so the actor would "
            f"never be trained. Set trainer.critic_warmup to less than {total_steps}, or train longer."
        )
        yield Problem("trainer.critic_warmup", warmup, message, ("trainer.total_training_steps",))


def _check_training(config: PPOConfig | SupervisedConfig) -> Iterator[Problem]:
    """Check that a run has training data and an end, and validates if the best checkpoint is kept."""
    trainer = config.trainer
    if not config.data.train_files:
        yield Problem("data.train_files", None, "training requires at least one file. Set data=<file>.")
    if trainer.total_epochs is None and trainer.total_training_steps is None:
        message = "the run has no end. Set trainer.total_training_steps or trainer.total_epochs."
        yield Problem("trainer.total_epochs", None, message, ("trainer.total_training_steps",))
    if trainer.best_metric is not None and trainer.test_freq == -1:
        message = "requires validation during training. Set trainer.test_freq=<steps>."
        yield Problem("trainer.best_metric", trainer.best_metric, message, ("trainer.test_freq",))


def _check_warmup(key: str, optim: OptimSection, run_steps: int | None, skipped: int = 0) -> Iterator[Problem]:
    """Check that the schedule is longer than its warm-up. The schedule of the actor starts after `skipped` steps."""
    related, length = f"{key}.total_training_steps", optim.total_training_steps
    source = f"the length of the schedule ({related})"
    if length == -1 or optim.lr_scheduler_type == "constant":
        related, length = "trainer.total_training_steps", None if run_steps is None else run_steps - skipped
        source = f"the length of the run ({related}{f' - trainer.critic_warmup={skipped}' if skipped else ''})"
    if length is not None and 0 < length <= optim.lr_warmup_steps:
        message = f"must be less than {format_value(length)}, {source}."
        yield Problem(f"{key}.lr_warmup_steps", optim.lr_warmup_steps, message, (related,))


def _check_trackers(trackers: Iterable[str]) -> Iterator[Problem]:
    for tracker in trackers:
        yield from check_name("trainer.logger", tracker, TRACKERS, "trackers")
