"""Section `trainer` of RL runs: run length, devices, logging, validation and checkpoints."""

from typing import Literal

from pydantic import Field

from camshaft.config.layout import PlacementConfig, PoolConfig
from camshaft.config.schema.fields import Names, OffOrPositive, Path, Text


class TrainerConfig(PlacementConfig):
    """Run length, devices, logging, validation and checkpoints."""

    resource_pools: dict[str, PoolConfig] = Field(
        description="Additional resource pools for roles: {critic_pool: {nnodes: 1, n_gpus_per_node: 4}}."
    )
    total_epochs: int = Field(ge=1, description="Epochs over the training prompts.")
    total_training_steps: int | None = Field(ge=1, description="Maximum number of iterations; null runs total_epochs.")
    project_name: Text = Field(description="Project name in trackers and in the default checkpoint folder.")
    experiment_name: Text = Field(description="Run name in trackers and in the default checkpoint folder.")
    logger: Names = Field(
        description="Metric trackers: console, jsonl, wandb (or tracking), tensorboard, mlflow, trackio, or "
        "package.module:Class."
    )
    save_freq: OffOrPositive = Field(description="Iterations between checkpoints; -1 for none.")
    test_freq: OffOrPositive = Field(description="Iterations between validations; -1 for none.")
    val_before_train: bool = Field(description="Validate once before the first iteration.")
    val_only: bool = Field(description="Validate the initial or resumed model once, then stop.")
    log_val_generations: int = Field(
        ge=0, description="Validation responses to write per validation if validation_data_dir is null."
    )
    validation_data_dir: Path | None = Field(
        description="Folder for all responses of each validation, step_<n>.jsonl. null writes the first "
        "log_val_generations responses to <default_local_dir>/validation."
    )
    rollout_data_dir: Path | None = Field(
        description="Folder for all training responses with their scores, step_<n>.jsonl; null for none."
    )
    critic_warmup: int = Field(ge=0, description="Initial iterations that train only the critic.")
    default_hdfs_dir: Path | None = Field(
        description="Folder or URL (hdfs://, s3://) that checkpoints are copied to; null for none. Old copies are not "
        "deleted. A run resumes from the newest copy if default_local_dir has no checkpoint."
    )
    default_local_dir: Path = Field(description="Folder for checkpoints and metrics.")
    max_actor_ckpt_to_keep: int | None = Field(
        ge=1, description="Number of newest actor checkpoints to keep; null keeps all."
    )
    max_critic_ckpt_to_keep: int | None = Field(
        ge=1, description="Number of newest critic checkpoints to keep; null keeps all."
    )
    best_metric: Text | None = Field(
        description="Validation metric that selects the best checkpoint, which is kept in addition to the newest "
        "ones, for example val-core/gsm8k/reward/mean; null for none."
    )
    best_metric_mode: Literal["max", "min"] = Field(description="Direction of best_metric: max or min is better.")
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        description="auto resumes from the newest checkpoint in default_local_dir (or default_hdfs_dir), disable "
        "starts from the model, resume_path resumes from resume_from_path."
    )
    resume_from_path: Path | None = Field(description="Checkpoint to resume from; read with resume_mode=resume_path.")
    use_legacy_worker_impl: Literal["auto", "disable", "enable"] | bool = Field(
        description="Accepted for compatibility: auto, disable or false; no legacy implementation exists."
    )
    seed: int = Field(ge=0, lt=2**32, description="Random seed.")
