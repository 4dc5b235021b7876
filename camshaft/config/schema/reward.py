"""Sections `reward_model` and `custom_reward_function`."""

from typing import Any, Literal

from pydantic import Field

from camshaft.config.backends import ranks_per_row
from camshaft.config.schema.fields import Modules, Path, Section, Text
from camshaft.config.schema.fsdp import ForwardFSDPConfig


class RewardModelModelConfig(Section):
    """The reward model."""

    input_tokenizer: Path | None = Field(
        description="The policy's tokenizer, for a reward model with another tokenizer or chat template: responses "
        "are decoded with it and the conversation is formatted with the reward model's template. null: same token ids."
    )
    path: Path = Field(description="Hugging Face folder of a sequence-classification model, or its URL.")
    external_lib: Modules | None = Field(description="Python modules to import first, for example to register models.")
    override_config: dict[str, Any] = Field(description="Overrides of entries in config.json.")
    trust_remote_code: bool = Field(description="Allow transformers to run Python code from the model folder.")
    fsdp_config: ForwardFSDPConfig = Field(description="Dtype and sharding of the reward model.")


class OverlongBufferConfig(Section):
    """Soft overlong penalty (DAPO), which grows linearly over the last tokens before the length limit."""

    enable: bool = Field(description="Subtract the penalty from training scores; validation scores are unchanged.")
    len: int = Field(
        ge=0, description="Number of tokens before the limit over which the penalty grows from 0 to its maximum."
    )
    penalty_factor: float = Field(ge=0, description="Maximum penalty, for a response that reaches the limit.")
    log: bool = Field(description="Log the mean penalty and the fraction of penalized responses.")


class RewardModelConfig(Section):
    """A model that scores whole responses, in addition to or instead of scoring functions."""

    resource_pool: Text = Field(description="Resource pool: global_pool, or a name in trainer.resource_pools.")
    enable: bool = Field(description="Score with a reward model; false uses scoring functions only.")
    worker_cls: Text | None = Field(
        description="Custom worker, package.module:Class, with init_model and compute_rm_score; null uses the "
        "built-in one."
    )
    weight: float = Field(
        description="Weight of the model score: score = function score + weight * model score. Without a scoring "
        "function (custom_reward_function.name=null) the score is the unweighted model score."
    )
    strategy: Text = Field(description="Engine: a registered name, or package.module:Class.")
    model: RewardModelModelConfig = Field(description="The reward model.")
    micro_batch_size: int = Field(
        ge=1, description="Deprecated: sequences per forward pass over all ranks; use micro_batch_size_per_gpu."
    )
    micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per forward pass on one rank; overrides micro_batch_size."
    )
    use_dynamic_bsz: bool = Field(description="Size micro-batches by tokens instead of sequences.")
    forward_max_token_len_per_gpu: int = Field(ge=1, description="Maximum tokens per forward pass on one rank.")
    ulysses_sequence_parallel_size: int = Field(ge=1, description="Ulysses sequence-parallel size in ranks.")
    use_torch_compile: bool = Field(description="Compile the layers with torch.compile.")
    engine_kwargs: dict[str, Any] = Field(
        description="Options of a custom engine, validated by the engine's schema; the FSDP engines read fsdp_config."
    )
    max_length: int | None = Field(
        ge=1,
        description="Maximum sequence length in the reward model's tokens; longer sequences are truncated on the left "
        "and counted. null: prompt length plus response length.",
    )
    overlong_buffer: OverlongBufferConfig = Field(
        description="Penalty for long responses, with or without a reward model."
    )

    def engine_keys(self) -> dict[str, Any]:
        """Return the settings that an engine may have an option for, by the name of the option."""
        return self.model.fsdp_config.model_dump() | {
            "ulysses_sequence_parallel_size": self.ulysses_sequence_parallel_size,
            "use_torch_compile": self.use_torch_compile,
        }

    def ranks_per_row(self) -> int:
        """Return the number of ranks that share one row."""
        return ranks_per_row(self.strategy, self.engine_keys(), self.engine_kwargs)


class CustomRewardConfig(Section):
    """Selection of the scoring function, and settings that apply to all scoring functions."""

    path: Path | None = Field(
        description="Python file or module with the scoring function; null selects a built-in function."
    )
    name: Text | None = Field(
        description="Name of the function, or its @register_reward name. Without a path, compute_score selects by "
        "data_source. null is compute_score; without a path, null disables scoring functions in camshaft generate and "
        "with a reward model."
    )
    reward_kwargs: dict[str, Any] = Field(description="Additional keyword arguments for every call.")
    batched: bool | None = Field(
        description="Call the function once per batch with lists: data_sources, solution_strs, ground_truths, "
        "extra_infos. null detects this from the function's parameter names."
    )
    timeout: float = Field(gt=0, description="Time limit of one call in seconds.")
    num_workers: int = Field(ge=1, description="Number of scoring processes.")
    on_error: Literal["zero", "drop", "raise"] = Field(
        description="Handling of a sample whose call fails or times out: score 0, drop it from the update, or stop "
        "the run. In validation and camshaft generate drop means zero."
    )

    def is_named(self) -> bool:
        """Return True if a scoring function is configured."""
        return self.path is not None or self.name is not None

    def function_name(self) -> str:
        """Return the name to load; without a path the default name is "auto", which selects by `data_source`."""
        name = self.name or "compute_score"
        return "auto" if self.path is None and name == "compute_score" else name
