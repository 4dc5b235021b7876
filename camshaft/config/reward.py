"""Sections about scores: the reward model, and a scoring function of the user's own."""

from typing import Any, Literal

from pydantic import Field

from camshaft.config.fields import Modules, Path, Section, Text


class RewardFSDPConfig(Section):
    """Sharding of the reward model."""

    min_num_params: int = Field(ge=0, description="Wrap modules with so many parameters; 0: by layer class.")
    param_offload: bool = Field(description="Keep parameters in host memory while they are not needed.")


class RewardModelModelConfig(Section):
    """Which model scores."""

    input_tokenizer: Path | None = Field(
        description="The actor's tokenizer, if the reward model's chat template differs; null if it is the same."
    )
    path: Path = Field(description="Local folder of a sequence-classification model in the Hugging Face layout.")
    external_lib: Modules | None = Field(description="Python modules to import first; they may register models.")
    fsdp_config: RewardFSDPConfig = Field(description="Sharding of the reward model.")


class RewardModelConfig(Section):
    """A model that scores whole responses, beside or instead of the scoring functions."""

    enable: bool = Field(description="Score with a model; false: with scoring functions alone.")
    model: RewardModelModelConfig = Field(description="Which model scores.")
    micro_batch_size: int = Field(ge=1, description="Sequences per forward pass, over all ranks.")
    max_length: int | None = Field(ge=1, description="Longest sequence that is scored; null: prompt plus response.")


class CustomRewardConfig(Section):
    """A scoring function of your own, and how all scoring functions are run."""

    path: Path | None = Field(description="Python file or module with the function; null: one of the functions here.")
    name: Text | None = Field(
        description="Name of the function; without a path, compute_score goes by data_source. null is compute_score, "
        "but for camshaft generate without a path: there nothing is scored."
    )
    reward_kwargs: dict[str, Any] = Field(description="Further keyword arguments for every call.")
    timeout: float = Field(gt=0, description="Seconds that one call may take.")
    num_workers: int = Field(ge=1, description="Processes that score.")
    on_error: Literal["zero", "raise"] = Field(description="A call that fails or runs out of time: score 0, or stop.")

    def is_named(self) -> bool:
        """Whether a function is asked for at all."""
        return self.path is not None or self.name is not None

    def function_name(self) -> str:
        """The name to load: without a path, the default name means the function that goes by `data_source`."""
        name = self.name or "compute_score"
        return "auto" if self.path is None and name == "compute_score" else name
