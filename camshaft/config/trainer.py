"""Section `trainer` of RL runs: how long, where, how often, and what is kept."""

from typing import Literal

from pydantic import Field

from camshaft.config.fields import Names, OffOrPositive, Path, Text
from camshaft.config.place import PlaceConfig, PoolConfig


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
    log_val_generations: int = Field(ge=0, description="Validation responses written out each time.")
    critic_warmup: int = Field(ge=0, description="Iterations at the start that train the critic alone.")
    default_hdfs_dir: Path | None = Field(
        description="Second place that checkpoints are copied to, a folder or a URL (hdfs://, s3://); null for none. "
        "Only written: old copies are not removed, and resuming does not look there yet."
    )
    default_local_dir: Path = Field(description="Folder of checkpoints and metrics.")
    max_actor_ckpt_to_keep: int | None = Field(ge=1, description="Actor checkpoints kept, newest first; null: all.")
    max_critic_ckpt_to_keep: int | None = Field(ge=1, description="Critic checkpoints kept, newest first; null: all.")
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        description="Start from the newest checkpoint in default_local_dir, from none, or from resume_from_path."
    )
    resume_from_path: Path | None = Field(description="Checkpoint to start from; read with resume_mode=resume_path.")
    use_legacy_worker_impl: Literal["auto", "disable", "enable"] | bool = Field(
        description="There is one implementation: auto, disable and false are accepted, enable and true are not."
    )
    seed: int = Field(ge=0, lt=2**32, description="Seed of everything that is drawn.")
