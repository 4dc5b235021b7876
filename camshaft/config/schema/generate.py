"""Config of `camshaft generate`, a command that generates responses to prompts and writes them to a file.

config = load_generate(["data.path=in.parquet", "data.output_path=out.parquet", "model.path=models/tiny"])
config.custom_reward_function.is_named()          # False
"""

from collections.abc import Iterator

from camshaft.config.layout import PlacementConfig, RayConfig
from camshaft.config.schema.data import DROPS_OVERLONG, ChatTemplateConfig, Truncation
from camshaft.config.schema.fields import CommandConfig, Count, OffOrPositive, Path, Paths, Text, key, section
from camshaft.config.schema.model import LoadedModel
from camshaft.config.schema.reward import CustomRewardConfig
from camshaft.config.schema.roles import GeneratorConfig


class GenerateDataConfig(ChatTemplateConfig):
    key_order = ("path", "output_path", "prompt_key", *ChatTemplateConfig.model_fields)

    path: Paths = key(
        None,
        "Data files with prompts: a path, folder, glob pattern or URL, or a list of them. Required. The files are "
        "loaded into memory.",
        short=("data", "prompts"),
    )
    output_path: Path = key(
        "~/data/generated.parquet",
        "Parquet file to write. It contains the rows of data.path in order, with the responses in additional columns.",
        short=("out", "parquet file for the responses"),
    )
    prompt_key: Text = key(
        "prompt", "Column that contains the prompt, either a list of {role, content} messages or a string."
    )
    response_key: Text = key(
        "responses",
        "Column to write the responses to. The names of the other new columns, such as responses_tokens and "
        "responses_finished, start with this name.",
    )
    reward_fn_key: Text = key(
        "data_source", "Column that contains the data source of each row. Read only if the responses are scored."
    )
    tokenizer: Path | None = key(None, "Path of the tokenizer. null uses the tokenizer of model.path.")
    batch_size: Count = key(
        128,
        "Number of prompts per generation batch, summed over all ranks. Each prompt has rollout.n responses. Each "
        "batch is written to disk when it is complete.",
        short=("batch", "prompts per generation batch"),
    )
    truncation: Truncation = key(
        "error",
        "Handling of prompts longer than rollout.prompt_length. error raises an error; left, right and middle remove "
        "tokens at that position.",
        unread=DROPS_OVERLONG,
    )
    filter_overlong_prompts: bool = key(False, "Drop rows whose prompt is longer than rollout.prompt_length.")
    max_samples: OffOrPositive = key(-1, "Maximum number of rows to read. -1 reads all rows.")


class GenerateTrainerConfig(PlacementConfig):
    seed: int = key(1, "Random seed.", ge=0, lt=2**32, short=("seed", "random seed"))


class GenerateConfig(CommandConfig):
    """All keys of `camshaft generate`."""

    data: GenerateDataConfig = section("Prompts to read, and the output file.")
    model: LoadedModel = section("Language model.")
    rollout: GeneratorConfig = section(
        "Settings of the generator.",
        {"n": 1, "gpu_memory_utilization": 0.9, "load_format": "dummy_hf"},
    )
    custom_reward_function: CustomRewardConfig = section("Scoring function for the responses.", {"name": None})
    trainer: GenerateTrainerConfig = section("Devices and random seed.")
    ray_kwargs: RayConfig = section("Settings of Ray, used with trainer.controller=ray.")

    def plays_episodes(self) -> bool:
        """Return True if the model plays episodes, with an environment or a program."""
        return self.rollout.multi_turn.plays()

    def model_sources(self) -> Iterator[tuple[str, bool]]:
        """Yield the model and the tokenizer, and whether the command needs the weights."""
        yield self.model.source(), True
        yield self.tokenizer_path(), False

    def tokenizer_path(self) -> str:
        """Return the path of the tokenizer for prompts and responses."""
        return self.model.source(self.data.tokenizer)
