"""Config of `camshaft sft` and `camshaft rm`, which train one model with one optimizer step per batch."""

# Sections are immutable, so a subclass can narrow the type of a key.
# pyright: reportIncompatibleVariableOverride=false

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt

from camshaft.config.layout import RayConfig
from camshaft.config.schema.data import NOT_SHUFFLED, ChatTemplateConfig, Truncation
from camshaft.config.schema.engine import MicroBatchKeys, TrainedSection
from camshaft.config.schema.fields import (
    Auto,
    CommandConfig,
    Count,
    Frequency,
    OffOrPositive,
    Path,
    Paths,
    Section,
    Text,
    key,
    section,
)
from camshaft.config.schema.fsdp import FSDPConfig
from camshaft.config.schema.model import ModelConfig, OptimSection
from camshaft.config.schema.trainer import WITHOUT_BEST_METRIC, RunConfig

SUPERVISED_UPDATES = MicroBatchKeys(
    "forward and backward pass", "micro_batch_size_per_gpu", "max_token_len_per_gpu", sequences=4, has_global_size=False
)


class SupervisedDataConfig(Section):
    """Training data, length limit and batch sizes."""

    train_files: Paths = key(
        None,
        "Data files with training data: a path, folder, glob pattern or URL, or a list of them. Required. The files "
        "are loaded into memory.",
        short=("data", "training data"),
    )
    val_files: Paths = key(
        None,
        "Data files for the validation loss, specified like train_files. null if the run does not validate.",
        short=("val_data", "validation data"),
    )
    max_length: int = key(
        1024,
        "Maximum sequence length in tokens, prompt and response together. It applies to each of the two sequences of "
        "a pair.",
        ge=2,
        short=("max_length", "maximum sequence length in tokens"),
    )
    truncation: Truncation = key(
        "error",
        "Handling of sequences longer than max_length. error raises an error; left, right and middle remove tokens "
        "at that position. For a reward model, left matches the truncation in camshaft ppo: it keeps the end of the "
        "sequence, at which the score is computed.",
    )
    train_batch_size: Annotated[Count, Auto()] = key(
        "auto",
        "Number of sequences (sft) or pairs (rm) per optimizer step, summed over all ranks. auto is 64, or the "
        "number of rows of smaller data.",
        short=("batch", "rows per training step"),
    )
    micro_batch_size_per_gpu: Annotated[Count | None, Auto()] = key(
        "auto",
        "Number of sequences (sft) or pairs (rm) per forward and backward pass on each rank. auto is 4 with "
        "use_dynamic_bsz=false.",
        unread=SUPERVISED_UPDATES.by_tokens,
    )
    use_dynamic_bsz: Annotated[bool, Auto()] = SUPERVISED_UPDATES.dynamic_key(
        note="Batches are not padded, so memory use depends on tokens. The tokens of both sequences of a pair are "
        "counted. "
    )
    max_token_len_per_gpu: Annotated[int, Auto()] = SUPERVISED_UPDATES.tokens_key(
        note=" auto is 4096 on a CPU and 8192 on an accelerator, less on a GPU in which this does not fit, and at "
        "least the length of the longest sequence or pair."
    )
    shuffle: bool = key(True, "Shuffle the training data in every epoch.")
    seed: NonNegativeInt | None = key(None, "Seed for shuffling the data. null uses trainer.seed.", unread=NOT_SHUFFLED)
    train_max_samples: OffOrPositive = key(-1, "Maximum number of training rows to load. -1 loads all rows.")


class SupervisedTrainerConfig(RunConfig):
    key_order = ("nnodes", "total_epochs", "project_name", "save_freq", "default_local_dir", "max_ckpt_to_keep")

    total_epochs: Annotated[Count | None, Auto()] = key(
        "auto",
        "Maximum number of epochs over the training data. auto is null if total_training_steps is set, and otherwise "
        "4 for camshaft sft and 1 for camshaft rm. null sets no limit.",
        short=("epochs", "epochs over the training data"),
    )
    total_training_steps: Count | None = key(
        None,
        "Maximum number of optimizer steps. null trains for total_epochs. If both are set, the run ends at the first "
        "limit.",
        short=("steps", "training steps"),
    )
    save_freq: Frequency = key(
        "auto",
        "Number of steps between checkpoints. auto saves every 10 minutes, or less often if saving would take more "
        "than a fifth of the time, and at the end. -1 disables checkpoints.",
    )
    test_freq: Frequency = key(
        "auto",
        "Number of steps between validations. auto spends up to a fifth of the time on validation, and validates at "
        "the end. -1 disables validation.",
    )
    max_skipped_steps: Count | None = key(
        10,
        "The run ends with an error after this many consecutive optimizer steps with a non-finite gradient, or after "
        "3 consecutive updates without an applied step. null disables both limits.",
    )
    max_ckpt_to_keep: Annotated[Count | None, Auto()] = key(
        "auto",
        "Number of most recent checkpoints to keep. null keeps all. auto is 2 with save_freq=auto, and null otherwise.",
    )
    best_metric: Text | None = key(
        None,
        "Validation metric that selects the best checkpoint, for example val/loss, or val/accuracy of a reward model "
        "with best_metric_mode=max. The best checkpoint is kept in addition to the most recent ones. null disables "
        "the selection.",
    )
    best_metric_mode: Literal["max", "min"] = key(
        "min",
        "Direction of best_metric: min selects the checkpoint with the smallest value, max the one with the largest "
        "value.",
        unread=WITHOUT_BEST_METRIC,
    )
    resume_mode: Literal["auto", "disable"] = key(
        "auto",
        "auto resumes from the newest checkpoint in default_local_dir (or default_hdfs_dir), if there is one. "
        "disable starts from model.path.",
    )
    export_path: Path | None = key(
        None, "Folder to export the final model to, in Hugging Face format. null uses <default_local_dir>/huggingface."
    )
    seed: int = key(1, "Random seed.", ge=0, lt=2**32, short=("seed", "random seed"))


class SupervisedConfig(CommandConfig, TrainedSection):
    """Keys that `camshaft sft` and `camshaft rm` share."""

    key_order = (
        "strategy", "data", "grad_clip", "fsdp_config", "ulysses_sequence_parallel_size", "checkpoint", "trainer",
    )  # fmt: skip

    strategy: Annotated[Text, Auto()] = key(
        "auto",
        "Training engine: fsdp (FSDP2, alias fsdp2), megatron, torchtitan, reference (one process without sharding), "
        "another registered name, or an import path package.module:Class. auto selects reference for one process on "
        "a CPU, and fsdp otherwise.",
        short=("engine", "training engine"),
    )
    data: SupervisedDataConfig = section("Training files, length limit and batch sizes.")
    model: ModelConfig = section(
        "Model to train.",
    )
    optim: OptimSection = section(
        "Optimizer and learning-rate schedule. The schedule advances once per optimizer step.",
        {"lr_warmup_steps_ratio": 0.03, "lr_scheduler_type": "cosine"},
    )
    fsdp_config: FSDPConfig = section("Weight dtype and sharding of the model.")
    trainer: SupervisedTrainerConfig = section("Run length, devices, logging, validation and checkpoints.")
    ray_kwargs: RayConfig = section("Settings of Ray, used with trainer.controller=ray.")

    @abstractmethod
    def max_row_length(self) -> int:
        """Return the maximum number of tokens of a row, a sequence (sft) or a pair of sequences (rm)."""

    def sharding(self) -> FSDPConfig:
        return self.fsdp_config

    def engine_keys(self) -> dict[str, Any]:
        return super().engine_keys() | {"activation_offload": self.model.enable_activation_offload}

    def model_sources(self) -> Iterator[tuple[str, bool]]:
        """Yield the model, and whether the run needs its weights."""
        yield self.model.source(), not self.model.random_init

    def data_seed(self) -> int:
        """Return the seed for shuffling the data."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    def export_path(self) -> str:
        """Return the folder that the final model is exported to."""
        return self.trainer.export_path or f"{self.trainer.default_local_dir}/huggingface"


class SFTDataConfig(SupervisedDataConfig, ChatTemplateConfig):
    """Prompts with target responses, length limit and batch sizes."""

    key_order = ("train_files", "val_files", "prompt_key", "response_key", *ChatTemplateConfig.model_fields)

    prompt_key: Text = key(
        "prompt", "Column that contains the prompt, either a list of {role, content} messages or a string."
    )
    response_key: Text = key("response", "Column that contains the target response.")


class SFTConfig(SupervisedConfig):
    """All keys of `camshaft sft`."""

    data: SFTDataConfig = section("Prompts with target responses, and batch sizes.")

    def max_row_length(self) -> int:
        return self.data.max_length


class RMDataConfig(SupervisedDataConfig):
    """Preference pairs, length limit, and batch sizes in pairs."""

    prompt_key: Text | None = key(
        "prompt",
        "Column that contains the prompt, either a list of {role, content} messages or a string. null if the chosen "
        "and rejected columns contain complete conversations.",
    )
    chosen_key: Text = key("chosen", "Column that contains the chosen response, either a string or a list of messages.")
    rejected_key: Text = key(
        "rejected", "Column that contains the rejected response, either a string or a list of messages."
    )
    margin_key: Text | None = key(
        None,
        "Column that contains the margin by which the score of the chosen response should exceed the score of the "
        "rejected one. null uses no margin.",
    )


class RMConfig(SupervisedConfig):
    """All keys of `camshaft rm`."""

    data: RMDataConfig = section("Preference pairs, and batch sizes.")
    center_rewards_coefficient: NonNegativeFloat = key(
        0.0,
        "Coefficient of an additional loss term, the squared sum of the two scores of a pair, which centers the "
        "scores at 0. 0 disables the term; 0.01 is a typical value.",
    )

    def max_row_length(self) -> int:
        return 2 * self.data.max_length
