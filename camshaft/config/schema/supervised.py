"""What the configs of `camshaft sft` and `camshaft rm` have in common: one model, one optimizer step a batch.

`sft.py` and `rm.py` add what a row of their data holds.
"""

from abc import abstractmethod
from typing import Literal

from pydantic import Field

from camshaft.config.place import PlaceConfig, RayConfig
from camshaft.config.schema.data import Truncation
from camshaft.config.schema.fields import Names, OffOrPositive, Path, Paths, Section, Text
from camshaft.config.schema.model import CheckpointConfig, FSDPConfig, ModelConfig, OptimSection


class SupervisedDataConfig(Section):
    """Which rows are read, how long they may be, and batch sizes."""

    train_files: Paths = Field(description="Parquet files to train on, read whole: paths, folders, patterns or URLs.")
    val_files: Paths = Field(description="Parquet files for the validation loss; null for none.")
    max_length: int = Field(ge=2, description="Longest sequence in tokens, prompt and response.")
    truncation: Truncation = Field(
        description="A sequence longer than max_length: an error, or cut at the left, the right or the middle."
    )
    train_batch_size: int = Field(ge=1, description="Sequences, or pairs, per optimizer step, over all ranks.")
    micro_batch_size_per_gpu: int = Field(
        ge=1, description="Sequences, or pairs, per forward and backward pass on one rank."
    )
    use_dynamic_bsz: bool = Field(description="Size micro-batches by tokens (max_token_len_per_gpu), not by count.")
    max_token_len_per_gpu: int = Field(ge=1, description="Most tokens per forward and backward pass on one rank.")
    shuffle: bool = Field(description="Draw the rows in a new order every epoch.")
    seed: int | None = Field(ge=0, description="Seed of that order; null takes trainer.seed.")
    train_max_samples: OffOrPositive = Field(description="Read at most so many training rows; -1 reads all.")


class SupervisedTrainerConfig(PlaceConfig):
    """The run as a whole."""

    total_epochs: int = Field(ge=1, description="Passes over the training rows.")
    total_training_steps: int | None = Field(ge=1, description="Stop after so many steps; null: after the epochs.")
    project_name: Text = Field(description="Groups runs in the trackers and in the default folder of checkpoints.")
    experiment_name: Text = Field(description="Names this run.")
    logger: Names = Field(
        description="Where metrics go: console, jsonl, wandb (or tracking), tensorboard, mlflow, trackio, or "
        "package.module:Class."
    )
    save_freq: OffOrPositive = Field(description="Steps between checkpoints; -1 for none.")
    test_freq: OffOrPositive = Field(description="Steps between validations; -1 for none.")
    default_local_dir: Path = Field(description="Folder of checkpoints and metrics.")
    default_hdfs_dir: Path | None = Field(
        description="Second place that checkpoints are copied to, a folder or a URL (hdfs://, s3://); null for none. "
        "Old copies are not removed. A run that finds no step in default_local_dir goes on from the newest here."
    )
    max_ckpt_to_keep: int | None = Field(ge=1, description="Checkpoints kept, newest first; null: all.")
    best_metric: Text | None = Field(
        description="Validation metric by which the best step is saved and kept beside the newest: val/loss, for "
        "instance; null for none."
    )
    best_metric_mode: Literal["max", "min"] = Field(
        description="Whether the largest or the smallest value is the best."
    )
    resume_mode: Literal["auto", "disable"] = Field(
        description="Start from the newest checkpoint in default_local_dir (or default_hdfs_dir), or from the model as "
        "it is."
    )
    export_path: Path | None = Field(
        description="Folder of the finished model in the Hugging Face layout; null: <default_local_dir>/huggingface."
    )
    seed: int = Field(ge=0, lt=2**32, description="Seed of everything that is drawn.")


class SupervisedConfig(Section):
    """Everything that such a run reads."""

    strategy: Text = Field(description="Training engine: a name, or package.module:Class for one of your own.")
    data: SupervisedDataConfig = Field(description="What is learnt, and batch sizes.")
    model: ModelConfig = Field(description="The model that is trained.")
    optim: OptimSection = Field(description="Optimizer and schedule; one step of the schedule is one optimizer step.")
    grad_clip: float = Field(gt=0, description="Longest gradient; a longer one is scaled down to it.")
    fsdp_config: FSDPConfig = Field(description="Number format and sharding of the model.")
    ulysses_sequence_parallel_size: int = Field(ge=1, description="Ranks that share the tokens of one micro-batch.")
    use_torch_compile: bool = Field(description="Compile the layers with torch.compile.")
    checkpoint: CheckpointConfig = Field(description="How checkpoints are written.")
    trainer: SupervisedTrainerConfig = Field(description="The run as a whole.")
    ray_kwargs: RayConfig = Field(description="For trainer.controller=ray.")

    @abstractmethod
    def longest_row(self) -> int:
        """Tokens of the longest row that a batch can have."""

    def ranks_per_row(self) -> int:
        """Ranks that compute one row together."""
        return self.ulysses_sequence_parallel_size * self.fsdp_config.tensor_parallel_size

    def data_seed(self) -> int:
        """Seed of the order of training rows."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    def export_path(self) -> str:
        """Folder that the finished model is written to."""
        return self.trainer.export_path or f"{self.trainer.default_local_dir}/huggingface"
