"""Config of `camshaft generate`, a command that generates responses to prompts and writes them to a file.

config = load_generate(["data.path=in.parquet", "data.output_path=out.parquet", "model.path=models/tiny"])
config.custom_reward_function.is_named()          # False
"""

from pydantic import Field

from camshaft.config.layout import PlacementConfig, RayConfig
from camshaft.config.schema.data import Truncation
from camshaft.config.schema.fields import CommandConfig, Count, OffOrPositive, Path, Paths, Section, Text
from camshaft.config.schema.model import LoadedModel
from camshaft.config.schema.reward import CustomRewardConfig
from camshaft.config.schema.roles import GeneratorConfig


class GenerateDataConfig(Section):
    path: Paths = Field(
        description="Data files with prompts: a path, folder, glob pattern or URL, or a list of them. The files "
        "are loaded into memory."
    )
    output_path: Path = Field(
        description="Parquet file to write. It contains the rows of data.path in order, with the responses in "
        "additional columns."
    )
    prompt_key: Text = Field(
        description="Column that contains the prompt, either a list of {role, content} messages or a string."
    )
    response_key: Text = Field(
        description="Column to write the responses to. The names of the other new columns start with this name."
    )
    reward_fn_key: Text = Field(
        description="Column that contains the data source of each row. Read only if the responses are scored."
    )
    tokenizer: Path | None = Field(description="Path of the tokenizer. null uses the tokenizer of model.path.")
    batch_size: Count = Field(
        description="Number of prompts per generation batch, summed over all ranks. Each batch is written to disk "
        "when it is complete.",
    )
    truncation: Truncation = Field(
        description="Handling of prompts longer than rollout.prompt_length. error raises an error; left, right and "
        "middle remove tokens at that position."
    )
    filter_overlong_prompts: bool = Field(description="Drop rows whose prompt is longer than rollout.prompt_length.")
    max_samples: OffOrPositive = Field(description="Maximum number of rows to read. -1 reads all rows.")


class GenerateTrainerConfig(PlacementConfig):
    seed: int = Field(ge=0, lt=2**32, description="Random seed.")


class GenerateConfig(CommandConfig):
    """All keys of `camshaft generate`."""

    data: GenerateDataConfig = Field(description="Prompts to read, and the output file.")
    model: LoadedModel = Field(description="Language model.")
    rollout: GeneratorConfig = Field(description="Settings of the generator.")
    custom_reward_function: CustomRewardConfig = Field(description="Scoring function for the responses.")
    trainer: GenerateTrainerConfig = Field(description="Devices and random seed.")
    ray_kwargs: RayConfig = Field(description="Settings of Ray, used with trainer.controller=ray.")

    def tokenizer_path(self) -> str:
        """Return the path of the tokenizer for prompts and responses."""
        return self.model.source(self.data.tokenizer)
