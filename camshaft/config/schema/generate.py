"""Config of `camshaft generate`, which writes responses to a file of prompts.

config = load_generate(["data.path=in.parquet", "data.output_path=out.parquet", "model.path=models/tiny"])
config.custom_reward_function.is_named()          # False
"""

from typing import Any

from pydantic import Field

from camshaft.config.layout import PlacementConfig, RayConfig
from camshaft.config.schema.data import Truncation
from camshaft.config.schema.fields import Modules, OffOrPositive, Path, Paths, Section, Text
from camshaft.config.schema.reward import CustomRewardConfig
from camshaft.config.schema.roles import GeneratorConfig


class GenerateDataConfig(Section):
    """Prompts to read, and the output file."""

    path: Paths = Field(
        description="Parquet files with prompts, read into memory: paths, folders, glob patterns or URLs."
    )
    output_path: Path = Field(
        description="Parquet file to write: the rows of data.path in order, with responses in new columns."
    )
    prompt_key: Text = Field(description="Column with the prompt: a list of {role, content} messages, or a string.")
    response_key: Text = Field(
        description="Column to write responses to; the other new columns use its name as a prefix."
    )
    reward_fn_key: Text = Field(description="Column with the data source of a row; read if responses are scored.")
    tokenizer: Path | None = Field(description="Path of the tokenizer; null uses the model's.")
    batch_size: int = Field(
        ge=1, description="Prompts per generation batch, over all ranks; each batch is written when it is complete."
    )
    truncation: Truncation = Field(
        description="Handling of prompts longer than rollout.prompt_length: raise an error, or truncate at that side."
    )
    filter_overlong_prompts: bool = Field(description="Drop rows whose prompt is longer than rollout.prompt_length.")
    max_samples: OffOrPositive = Field(description="Maximum number of rows to read; -1 reads all.")


class GenerateModelConfig(Section):
    """The language model."""

    path: Path = Field(description="Hugging Face model folder (config.json, weights, tokenizer) or its URL.")
    external_lib: Modules | None = Field(description="Python modules to import first, for example to register models.")
    override_config: dict[str, Any] = Field(description="Overrides of entries in config.json.")
    trust_remote_code: bool = Field(description="Allow transformers to run Python code from the model folder.")


class GenerateTrainerConfig(PlacementConfig):
    """Devices and seed."""

    seed: int = Field(ge=0, lt=2**32, description="Random seed.")


class GenerateConfig(Section):
    """All keys of `camshaft generate`."""

    data: GenerateDataConfig = Field(description="Prompts to read, and the output file.")
    model: GenerateModelConfig = Field(description="The language model.")
    rollout: GeneratorConfig = Field(description="Generation of responses.")
    custom_reward_function: CustomRewardConfig = Field(description="Scoring function for the responses.")
    trainer: GenerateTrainerConfig = Field(description="Devices and seed.")
    ray_kwargs: RayConfig = Field(description="Settings for trainer.controller=ray.")

    def tokenizer_path(self) -> str:
        """Return the path of the tokenizer of prompts and responses."""
        return self.data.tokenizer or self.model.path
