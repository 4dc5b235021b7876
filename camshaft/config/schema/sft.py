"""The whole config of a supervised fine-tuning run."""

from pydantic import Field

from camshaft.config.schema.fields import Text
from camshaft.config.schema.supervised import SupervisedConfig, SupervisedDataConfig


class SFTDataConfig(SupervisedDataConfig):
    """Prompts with the responses to learn, and batch sizes."""

    prompt_key: Text = Field(description="Column with the prompt: a list of {role, content} messages, or raw text.")
    response_key: Text = Field(description="Column with the response to learn.")


class SFTConfig(SupervisedConfig):
    """Everything that a supervised run reads."""

    data: SFTDataConfig = Field(description="Prompts with the responses to learn.")

    def longest_row(self) -> int:
        """Tokens of the longest sequence."""
        return self.data.max_length
