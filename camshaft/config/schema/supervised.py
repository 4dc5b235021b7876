"""Sections shared by `camshaft sft` and `camshaft rm`, which train one model with one optimizer step per batch."""

from abc import abstractmethod
from typing import Any, Literal

from pydantic import Field

from camshaft.config.backends import ranks_per_row
from camshaft.config.layout import PlacementConfig, RayConfig
from camshaft.config.schema.data import Truncation
from camshaft.config.schema.fields import Names, OffOrPositive, Path, Paths, Section, Text
from camshaft.config.schema.fsdp import FSDPConfig
from camshaft.config.schema.model import CheckpointConfig, ModelConfig, OptimSection


class SupervisedDataConfig(Section):
    """Training files, length limit and batch sizes."""

    train_files: Paths = Field(
        description="Parquet files with training rows, read into memory: paths, folders, glob patterns or URLs."
    )
    val_files: Paths = Field(description="Parquet files for the validation loss; null for none.")
    max_length: int = Field(ge=2, description="Maximum sequence length in tokens, prompt plus response.")
    truncation: Truncation = Field(
        description="Handling of sequences longer than max_length: raise an error, or truncate at that side."
    )
    train_batch_size: int = Field(ge=1, description="Sequences, or pairs, per optimizer step, over all ranks.")
    micro_batch_size_per_gpu: int = Field(
        ge=1, description="Sequences, or pairs, per forward and backward pass on one rank."
    )
    use_dynamic_bsz: bool = Field(
        description="Size micro-batches by tokens (max_token_len_per_gpu) instead of by count."
    )
    max_token_len_per_gpu: int = Field(ge=1, description="Maximum tokens per forward and backward pass on one rank.")
    shuffle: bool = Field(description="Shuffle the rows every epoch.")
    seed: int | None = Field(ge=0, description="Seed of the shuffle; null uses trainer.seed.")
    train_max_samples: OffOrPositive = Field(description="Maximum number of training rows to read; -1 reads all.")


class SupervisedTrainerConfig(PlacementConfig):
    """Run length, devices, logging, validation and checkpoints."""

    total_epochs: int = Field(ge=1, description="Epochs over the training rows.")
    total_training_steps: int | None = Field(ge=1, description="Maximum number of steps; null runs total_epochs.")
    project_name: Text = Field(description="Project name in trackers and in the default checkpoint folder.")
    experiment_name: Text = Field(description="Run name in trackers and in the default checkpoint folder.")
    logger: Names = Field(
        description="Metric trackers: console, jsonl, wandb (or tracking), tensorboard, mlflow, trackio, or "
        "package.module:Class."
    )
    save_freq: OffOrPositive = Field(description="Steps between checkpoints; -1 for none.")
    test_freq: OffOrPositive = Field(description="Steps between validations; -1 for none.")
    default_local_dir: Path = Field(description="Folder for checkpoints and metrics.")
    default_hdfs_dir: Path | None = Field(
        description="Folder or URL (hdfs://, s3://) that checkpoints are copied to; null for none. Old copies are not "
        "deleted. A run resumes from the newest copy if default_local_dir has no checkpoint."
    )
    max_ckpt_to_keep: int | None = Field(ge=1, description="Number of newest checkpoints to keep; null keeps all.")
    best_metric: Text | None = Field(
        description="Validation metric that selects the best checkpoint, which is kept in addition to the newest "
        "ones, for example val/loss; null for none."
    )
    best_metric_mode: Literal["max", "min"] = Field(description="Direction of best_metric: max or min is better.")
    resume_mode: Literal["auto", "disable"] = Field(
        description="auto resumes from the newest checkpoint in default_local_dir (or default_hdfs_dir); disable "
        "starts from model.path."
    )
    export_path: Path | None = Field(
        description="Folder for the final model in Hugging Face format; null: <default_local_dir>/huggingface."
    )
    seed: int = Field(ge=0, lt=2**32, description="Random seed.")


class SupervisedConfig(Section):
    """All keys common to `camshaft sft` and `camshaft rm`."""

    strategy: Text = Field(description="Training engine: a registered name, or package.module:Class.")
    data: SupervisedDataConfig = Field(description="Training files, length limit and batch sizes.")
    model: ModelConfig = Field(description="Model to train.")
    optim: OptimSection = Field(
        description="Optimizer and learning-rate schedule; one schedule step is one optimizer step."
    )
    grad_clip: float = Field(gt=0, description="Maximum gradient norm; larger gradients are clipped.")
    fsdp_config: FSDPConfig = Field(description="Dtype and sharding of the model.")
    ulysses_sequence_parallel_size: int = Field(ge=1, description="Ulysses sequence-parallel size in ranks.")
    use_torch_compile: bool = Field(description="Compile the layers with torch.compile.")
    engine_kwargs: dict[str, Any] = Field(
        description="Options of a custom engine, validated by the engine's schema; the FSDP engines read fsdp_config."
    )
    checkpoint: CheckpointConfig = Field(description="Checkpoint contents and writing mode.")
    trainer: SupervisedTrainerConfig = Field(description="Run length, devices, logging, validation and checkpoints.")
    ray_kwargs: RayConfig = Field(description="Settings for trainer.controller=ray.")

    @abstractmethod
    def longest_row(self) -> int:
        """Return the maximum number of tokens of a row."""

    def engine_keys(self) -> dict[str, Any]:
        """Return the settings that an engine may have an option for, by the name of the option."""
        return self.fsdp_config.model_dump() | {
            "ulysses_sequence_parallel_size": self.ulysses_sequence_parallel_size,
            "use_torch_compile": self.use_torch_compile,
            "async_save": self.checkpoint.async_save,
            "activation_offload": self.model.enable_activation_offload,
        }

    def ranks_per_row(self) -> int:
        """Return the number of ranks that share one row."""
        return ranks_per_row(self.strategy, self.engine_keys(), self.engine_kwargs)

    def data_seed(self) -> int:
        """Return the seed of the row shuffle."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    def export_path(self) -> str:
        """Return the folder for the final model."""
        return self.trainer.export_path or f"{self.trainer.default_local_dir}/huggingface"


class SFTDataConfig(SupervisedDataConfig):
    """Prompts with target responses, and batch sizes."""

    prompt_key: Text = Field(description="Column with the prompt: a list of {role, content} messages, or a string.")
    response_key: Text = Field(description="Column with the target response.")


class SFTConfig(SupervisedConfig):
    """All keys of `camshaft sft`."""

    data: SFTDataConfig = Field(description="Prompts with target responses, and batch sizes.")

    def longest_row(self) -> int:
        """Return the maximum number of tokens of a sequence."""
        return self.data.max_length


class RMDataConfig(SupervisedDataConfig):
    """Preference pairs, and batch sizes in pairs."""

    prompt_key: Text | None = Field(
        description="Column with the prompt: a list of {role, content} messages, or a string; null: chosen and "
        "rejected contain whole conversations."
    )
    chosen_key: Text = Field(description="Column with the chosen response: a string, or messages.")
    rejected_key: Text = Field(description="Column with the rejected response: a string, or messages.")
    margin_key: Text | None = Field(
        description="Column with the margin by which the chosen score should exceed the rejected score; null for none."
    )


class RMConfig(SupervisedConfig):
    """All keys of `camshaft rm`."""

    data: RMDataConfig = Field(description="Preference pairs, and batch sizes.")
    center_rewards_coefficient: float = Field(
        ge=0, description="Coefficient of the squared sum of a pair's scores, which centers scores at 0; 0 disables it."
    )

    def longest_row(self) -> int:
        """Return the maximum number of tokens of a pair."""
        return 2 * self.data.max_length
