"""The whole config of `camshaft generate`: prompts in, responses out, nothing trained.

config = load_generate(["data.path=in.parquet", "data.output_path=out.parquet", "model.path=models/tiny"])
config.custom_reward_function.is_named()          # False
"""

from typing import Any

from pydantic import Field

from camshaft.config.place import PlaceConfig, RayConfig
from camshaft.config.schema.data import Truncation
from camshaft.config.schema.fields import Modules, OffOrPositive, Path, Paths, Section, Text
from camshaft.config.schema.reward import CustomRewardConfig
from camshaft.config.schema.roles import GeneratorConfig


class GenerateDataConfig(Section):
    """Which prompts are read, and where the responses go."""

    path: Paths = Field(description="Parquet files with the prompts, read whole: paths, folders, patterns or URLs.")
    output_path: Path = Field(
        description="Parquet file to write: the rows of data.path, in their order, with the responses in new columns."
    )
    prompt_key: Text = Field(description="Column with the prompt: a list of {role, content} messages, or raw text.")
    response_key: Text = Field(description="Column that is written; the others begin with its name.")
    reward_fn_key: Text = Field(description="Column with the name of a row's data set; read where rows are scored.")
    tokenizer: Path | None = Field(description="Folder of the tokenizer; null takes the model's.")
    batch_size: int = Field(ge=1, description="Prompts generated and written together, over all ranks.")
    truncation: Truncation = Field(
        description="A prompt longer than rollout.prompt_length: an error, or cut at the left, the right or the middle."
    )
    filter_overlong_prompts: bool = Field(description="Leave rows out whose prompt is longer than that.")
    max_samples: OffOrPositive = Field(description="Read at most so many rows; -1 reads all.")


class GenerateModelConfig(Section):
    """The language model."""

    path: Path = Field(description="Folder in the Hugging Face layout: config.json, weights, tokenizer; or its URL.")
    external_lib: Modules | None = Field(description="Python modules to import first; they may register models.")
    override_config: dict[str, Any] = Field(description="Entries that replace those of config.json.")
    trust_remote_code: bool = Field(description="Let transformers run Python code from the model's folder.")


class GenerateTrainerConfig(PlaceConfig):
    """Where it runs."""

    seed: int = Field(ge=0, lt=2**32, description="Seed of everything that is drawn.")


class GenerateConfig(Section):
    """Everything that `camshaft generate` reads."""

    data: GenerateDataConfig = Field(description="Which prompts are read, and where the responses go.")
    model: GenerateModelConfig = Field(description="The language model.")
    rollout: GeneratorConfig = Field(description="Generation of responses.")
    custom_reward_function: CustomRewardConfig = Field(description="A scoring function for the responses.")
    trainer: GenerateTrainerConfig = Field(description="Where it runs; nothing is trained.")
    ray_kwargs: RayConfig = Field(description="For trainer.controller=ray.")

    def tokenizer_path(self) -> str:
        """Folder of the tokenizer that prompts and responses are in."""
        return self.data.tokenizer or self.model.path
