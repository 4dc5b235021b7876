"""Sections about scores: the reward model, and a scoring function of the user's own."""

from typing import Any, Literal

from pydantic import Field

from camshaft.config.schema.fields import Modules, Path, Section, Text
from camshaft.config.schema.model import ForwardFSDPConfig


class RewardModelModelConfig(Section):
    """Which model scores."""

    input_tokenizer: Path | None = Field(
        description="The policy's tokenizer, where the reward model has another tokenizer or chat template: responses "
        "become text by it, and the conversation is put through the reward model's template. null: the same ids."
    )
    path: Path = Field(description="Folder of a sequence-classification model in the Hugging Face layout; or its URL.")
    external_lib: Modules | None = Field(description="Python modules to import first; they may register models.")
    override_config: dict[str, Any] = Field(description="Entries that replace those of config.json.")
    trust_remote_code: bool = Field(description="Let transformers run Python code from the model's folder.")
    fsdp_config: ForwardFSDPConfig = Field(description="Number format and sharding of the reward model.")


class OverlongBufferConfig(Section):
    """A penalty for long responses (DAPO), whatever scores them: it grows over the last tokens before the limit."""

    enable: bool = Field(description="Take the penalty from the scores that are trained on; validation has none.")
    len: int = Field(ge=0, description="Tokens before the limit over which the penalty grows from 0 to its largest.")
    penalty_factor: float = Field(ge=0, description="The largest penalty, for a response as long as the limit.")
    log: bool = Field(description="Track the mean penalty and the share of responses that have one.")


class RewardModelConfig(Section):
    """A model that scores whole responses, beside or instead of the scoring functions."""

    resource_pool: Text = Field(description="Which devices it lives on: global_pool, or one of trainer.resource_pools.")
    enable: bool = Field(description="Score with a model; false: with scoring functions alone.")
    worker_cls: Text | None = Field(
        description="A worker of your own, package.module:Class, with init_model and compute_rm_score; null: ours."
    )
    weight: float = Field(
        description="What the model's score counts: score = function's + weight x model's. Without a function (null as "
        "custom_reward_function.name) the model's alone."
    )
    strategy: Text = Field(description="Engine of the model: a name, or package.module:Class for one of your own.")
    model: RewardModelModelConfig = Field(description="Which model scores.")
    micro_batch_size: int = Field(ge=1, description="Sequences per forward pass, over all ranks.")
    micro_batch_size_per_gpu: int | None = Field(
        ge=1, description="Sequences per forward pass on one rank; wins over micro_batch_size."
    )
    use_dynamic_bsz: bool = Field(description="Size micro-batches by tokens, not sequences.")
    forward_max_token_len_per_gpu: int = Field(ge=1, description="Most tokens per forward pass on one rank.")
    ulysses_sequence_parallel_size: int = Field(ge=1, description="Ranks that share the tokens of one micro-batch.")
    use_torch_compile: bool = Field(description="Compile the layers with torch.compile.")
    max_length: int | None = Field(
        ge=1,
        description="Longest sequence that is scored, in the model's own tokens; of a longer one the beginning is left "
        "out, and counted. null: prompt plus response.",
    )
    overlong_buffer: OverlongBufferConfig = Field(description="A penalty for long responses, with or without a model.")

    def ranks_per_row(self) -> int:
        """Ranks that compute one row together."""
        return self.ulysses_sequence_parallel_size * self.model.fsdp_config.tensor_parallel_size


class CustomRewardConfig(Section):
    """A scoring function of your own, and how all scoring functions are run."""

    path: Path | None = Field(description="Python file or module with the function; null: one of the functions here.")
    name: Text | None = Field(
        description="Name of the function, or what @register_reward calls it; without a path, compute_score goes by "
        "data_source. null is compute_score, but without a path it is no function in camshaft generate and where a "
        "reward model scores."
    )
    reward_kwargs: dict[str, Any] = Field(description="Further keyword arguments for every call.")
    batched: bool | None = Field(
        description="Whether a call has the lists of a whole batch: data_sources, solution_strs, ground_truths, "
        "extra_infos. null: if those are the names of the function's parameters."
    )
    timeout: float = Field(gt=0, description="Seconds that one call may take.")
    num_workers: int = Field(ge=1, description="Processes that score.")
    on_error: Literal["zero", "drop", "raise"] = Field(
        description="A sample whose call fails or runs out of time: score 0, leave it out of the update, or stop. In "
        "validation and camshaft generate drop is zero."
    )

    def is_named(self) -> bool:
        """Whether a function is asked for at all."""
        return self.path is not None or self.name is not None

    def function_name(self) -> str:
        """The name to load: without a path, the default name means the function that goes by `data_source`."""
        name = self.name or "compute_score"
        return "auto" if self.path is None and name == "compute_score" else name
