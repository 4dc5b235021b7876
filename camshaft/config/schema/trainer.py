"""Section `trainer` of RL runs: how long, where, how often, and what is kept."""

from typing import Literal

from pydantic import Field

from camshaft.config.place import PlaceConfig, PoolConfig
from camshaft.config.schema.fields import Names, OffOrPositive, Path, Text


class TrainerConfig(PlaceConfig):
    """The run as a whole."""

    resource_pools: dict[str, PoolConfig] = Field(
        description="Further pools of devices, which roles may name: {critic_pool: {nnodes: 1, n_gpus_per_node: 4}}."
    )
    total_epochs: int = Field(ge=1, description="Passes over the training prompts.")
    total_training_steps: int | None = Field(ge=1, description="Stop after so many iterations; null: after the epochs.")
    project_name: Text = Field(description="Groups runs in the trackers and in the default folder of checkpoints.")
    experiment_name: Text = Field(description="Names this run.")
    logger: Names = Field(
        description="Where metrics go: console, jsonl, wandb (or tracking), tensorboard, mlflow, trackio, or "
        "package.module:Class."
    )
    save_freq: OffOrPositive = Field(description="Iterations between checkpoints; -1 for none.")
    test_freq: OffOrPositive = Field(description="Iterations between validations; -1 for none.")
    val_before_train: bool = Field(description="Validate once before the first iteration.")
    val_only: bool = Field(description="Validate once, the model that is started or resumed from, and stop.")
    log_val_generations: int = Field(
        ge=0, description="Validation responses written out each time where validation_data_dir is null."
    )
    validation_data_dir: Path | None = Field(
        description="Folder for all responses of each validation, step_<n>.jsonl; null: the first log_val_generations "
        "alone, in the folder validation of default_local_dir."
    )
    rollout_data_dir: Path | None = Field(
        description="Folder for all responses that are trained on, with their scores, step_<n>.jsonl; null for none."
    )
    critic_warmup: int = Field(ge=0, description="Iterations at the start that train the critic alone.")
    default_hdfs_dir: Path | None = Field(
        description="Second place that checkpoints are copied to, a folder or a URL (hdfs://, s3://); null for none. "
        "Old copies are not removed. A run that finds no step in default_local_dir goes on from the newest here."
    )
    default_local_dir: Path = Field(description="Folder of checkpoints and metrics.")
    max_actor_ckpt_to_keep: int | None = Field(ge=1, description="Actor checkpoints kept, newest first; null: all.")
    max_critic_ckpt_to_keep: int | None = Field(ge=1, description="Critic checkpoints kept, newest first; null: all.")
    best_metric: Text | None = Field(
        description="Validation metric by which the best step is saved and kept beside the newest, "
        "val-core/gsm8k/reward/mean for instance; null for none."
    )
    best_metric_mode: Literal["max", "min"] = Field(
        description="Whether the largest or the smallest value is the best."
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        description="Start from the newest checkpoint in default_local_dir (or default_hdfs_dir), from none, or from "
        "resume_from_path."
    )
    resume_from_path: Path | None = Field(description="Checkpoint to start from; read with resume_mode=resume_path.")
    use_legacy_worker_impl: Literal["auto", "disable", "enable"] | bool = Field(
        description="There is one implementation: auto, disable and false are accepted, enable and true are not."
    )
    seed: int = Field(ge=0, lt=2**32, description="Seed of everything that is drawn.")
