"""Config of `camshaft sft`, supervised fine-tuning."""

from pydantic import Field

from camshaft.config.schema.fields import Text
from camshaft.config.schema.supervised import SupervisedConfig, SupervisedDataConfig


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
