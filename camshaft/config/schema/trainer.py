"""Sections `trainer` and `async_training` of RL runs: run length, devices, logging, checkpoints, and the schedule."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from camshaft.config.errors import Problem
from camshaft.config.layout import PlacementConfig, PoolConfig
from camshaft.config.schema.fields import (
    Auto,
    Count,
    Described,
    Frequency,
    Functions,
    Names,
    Path,
    Section,
    Text,
    Unread,
    key,
    section,
)

HOOKS_KEY = "trainer.on_step"

WITHOUT_BEST_METRIC = Unread(
    lambda trainer: trainer.best_metric is None, "{best_metric}", "set [best_metric], or omit the key"
)


def pool_key(name: str) -> str:
    """Return the config key of a resource pool."""
    return f"trainer.resource_pools.{name}"


class SamplesConfig(Section):
    enable: bool = key(
        True,
        "Write the responses of each training step to <default_local_dir>/samples, one file step_<n>.parquet per step.",
    )
    token_rows: Count = key(
        32, "Maximum number of responses per step that are stored with log-probs and advantages per token."
    )
    max_gb: PositiveFloat = key(
        1.0,
        "Maximum size of all files in GB (10^9 bytes). Beyond it, files of older steps are deleted, so that the "
        "remaining steps become sparser with their age.",
    )


class RunConfig(PlacementConfig):
    """Keys of the section `trainer` that RL runs and supervised runs share."""

    project_name: Text = key(
        "camshaft_examples", "Project name in experiment trackers and in the default checkpoint folder."
    )
    experiment_name: Text | None = key(
        None,
        "Run name in experiment trackers and in the default checkpoint folder. If the command of a run with a name "
        "is repeated, the run resumes. null names the run after the model, the keys of a sweep and a number, for "
        "example tiny-3 or tiny-lr=0.003-4, so that each run has a folder of its own, or after default_local_dir if "
        "that is set.",
    )
    logger: Names = key(
        ["console", "jsonl"],
        "Experiment trackers: console, jsonl, wandb (or tracking), tensorboard, mlflow, trackio, prometheus, or an "
        "import path package.module:Class.",
    )
    default_local_dir: Path = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "Folder for checkpoints and metrics.",
        short=("out", "run folder"),
    )
    default_hdfs_dir: Path | None = key(
        None,
        "Folder or URL (hdfs://, s3://) to copy checkpoints to, for example "
        "~/experiments/${trainer.experiment_name}; null disables copies. Old copies are not deleted. A run resumes "
        "from the newest copy if default_local_dir contains no checkpoint.",
    )
    on_step: Functions = key(
        [],
        "Hooks that are called after each step with the step, its batch and its metrics, for example "
        "[hooks.py:count, my_package.hooks:log]. A dict that a hook returns is added to the metrics.",
        short=("on_step", "file.py:function that is called after each step; or a list"),
    )


class TrainerConfig(RunConfig):
    key_order = (
        "nnodes", "resource_pools", "project_name", "save_freq", "default_hdfs_dir", "default_local_dir",
        "max_actor_ckpt_to_keep",
    )  # fmt: skip

    resource_pools: dict[str, PoolConfig] = key(
        {},
        "Additional resource pools that roles can select, for example {critic_pool: {nnodes: 1, n_gpus_per_node: 4}}.",
    )
    total_epochs: Annotated[Count | None, Auto()] = key(
        "auto",
        "Maximum number of epochs over the training prompts. auto is null if total_training_steps is set, and 30 "
        "otherwise. null sets no limit.",
        short=("epochs", "epochs over the training prompts"),
    )
    total_training_steps: Count | None = key(
        None,
        "Maximum number of training iterations. null trains for total_epochs. If both are set, the run ends at the "
        "first limit.",
        short=("steps", "training steps"),
    )
    save_freq: Frequency = key(
        "auto",
        "Number of iterations between checkpoints. auto saves every 10 minutes, or less often if saving would take "
        "more than a fifth of the time, and at the end. -1 disables checkpoints.",
    )
    test_freq: Frequency = key(
        "auto",
        "Number of iterations between validations. auto spends up to a fifth of the time on validation, and "
        "validates at the end. -1 disables validation during training.",
    )
    val_before_train: Annotated[bool, Auto()] = key(
        "auto",
        "Validate once before the first iteration. A resumed run skips this validation. auto validates if "
        "data.val_files is set.",
    )
    val_only: bool = key(False, "Validate the initial or resumed model once, and exit without training.")
    log_val_generations: NonNegativeInt = key(
        4,
        "Number of responses per validation to send to the experiment trackers. If validation_data_dir is null, the "
        "same responses are written to <default_local_dir>/validation.",
    )
    sample_interval: PositiveFloat | None = key(
        60.0,
        "Minimum time in seconds between two steps whose best and worst response are printed. null prints no "
        "training responses.",
    )
    validation_data_dir: Path | None = key(
        "${trainer.default_local_dir}/validation",
        "Folder to write all validation responses to, one file step_<n>.jsonl per validation. null writes only the "
        "responses selected by log_val_generations.",
    )
    rollout_data_dir: Path | None = key(
        None,
        "Folder to write all training responses and their scores to, one file step_<n>.jsonl per iteration. null "
        "disables this output.",
    )
    samples: SamplesConfig = section("Responses of training steps in the run folder.")
    critic_warmup: NonNegativeInt = key(0, "Number of initial iterations that train only the critic.")
    stop_timeout: NonNegativeFloat = key(
        10.0,
        "Time limit, in seconds, for scoring after a stop signal (SIGTERM, SIGUSR1 or SIGHUP). If the responses are "
        "not scored in time, the step in progress is abandoned, and the last finished step is saved.",
    )
    max_skipped_steps: Count | None = key(
        10,
        "The run ends with an error after this many consecutive optimizer steps with a non-finite gradient, or after "
        "3 consecutive updates without an applied step. null disables both limits.",
    )
    max_idle_steps: Count | None = key(
        50,
        "The run ends after this many consecutive steps in which no token has a coefficient other than 0 in a loss, "
        "for example because all scores are equal. It saves a checkpoint, and ends with an error unless the prompts "
        "are solved. null sets no limit.",
    )
    max_actor_ckpt_to_keep: Annotated[Count | None, Auto()] = key(
        "auto",
        "Number of most recent actor checkpoints to keep. null keeps all. auto is 2 with save_freq=auto, and null "
        "otherwise.",
    )
    max_critic_ckpt_to_keep: Count | None = key(
        "${trainer.max_actor_ckpt_to_keep}", "Number of most recent critic checkpoints to keep. null keeps all."
    )
    best_metric: Text | None = key(
        None,
        "Validation metric that selects the best checkpoint, for example val-core/gsm8k/reward/mean. The best "
        "checkpoint is kept in addition to the most recent ones. null disables the selection.",
    )
    best_metric_mode: Literal["max", "min"] = key(
        "max",
        "Direction of best_metric: max selects the checkpoint with the largest value, min the one with the smallest "
        "value.",
        unread=WITHOUT_BEST_METRIC,
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key(
        "auto",
        "auto resumes from the newest checkpoint in default_local_dir (or default_hdfs_dir), if there is one. "
        "disable starts from the initial model. resume_path resumes from resume_from_path.",
    )
    resume_from_path: Path | None = key(None, "Checkpoint to resume from with resume_mode=resume_path.")
    max_restarts: NonNegativeInt = key(
        0,
        "Maximum number of times since the last saved step that `camshaft ppo` runs its command again, after a process "
        "or a machine has died, has not answered in time, or has lost its connection. The pauses are 10, 20, 40, ... "
        "seconds, up to ten minutes. "
        "See async.md.",
    )
    use_legacy_worker_impl: Literal["auto", "disable", "enable"] | bool = key(
        "auto",
        "Has no effect and is accepted for compatibility only. camshaft has no legacy implementation, so enable and "
        "true are rejected.",
    )
    seed: int = key(1, "Random seed.", ge=0, lt=2**32, short=("seed", "random seed"))

    def problems(self) -> Iterator[Problem]:
        if self.resume_mode == "resume_path" and self.resume_from_path is None:
            message = "requires a checkpoint to resume from. Set [resume_from_path]=<folder>, or [resume_mode]=auto."
            yield Problem("resume_mode", "resume_path", message, ("resume_from_path",))
        if self.resume_mode != "resume_path" and self.resume_from_path is not None:
            message = f"has no effect with [resume_mode]={self.resume_mode}. Set [resume_mode]=resume_path."
            yield Problem("resume_from_path", self.resume_from_path, message, ("resume_mode",))
        if self.use_legacy_worker_impl in ("enable", True):
            message = "camshaft has no legacy implementation. Omit the key."
            yield Problem("use_legacy_worker_impl", self.use_legacy_worker_impl, message)


Versions = Annotated[
    NonNegativeInt, Described("an integer >= 0: a number of versions of the weights, and not a share of the samples")
]


class AsyncTrainingConfig(Section):
    """Generation while earlier batches are learned."""

    mode: Literal["pipeline", "stream"] = key(
        "pipeline",
        "Schedule. pipeline generates whole batches, in an order that no clock decides. stream, in which single rows "
        "overlap, is not implemented yet.",
    )
    max_staleness: Versions = key(
        0,
        "Number of versions by which the weights that generate a batch may be older than those that train it. A "
        "version is one iteration. 0 generates and learns in turn. Above 0, the rollout has devices of its own "
        "(hybrid_engine=false) and generates the next batches while the actor learns, and a rollout correction is "
        "required. See async.md.",
        short=("max_staleness", "versions by which batches may be older than the weights that they train"),
    )
