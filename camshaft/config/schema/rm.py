"""The whole config of the training of a reward model."""

from pydantic import Field

from camshaft.config.schema.fields import Text
from camshaft.config.schema.supervised import SupervisedConfig, SupervisedDataConfig


class RMDataConfig(SupervisedDataConfig):
    """Pairs of answers, of which one is preferred, and batch sizes, which count pairs."""

    prompt_key: Text | None = Field(
        description="Column with the prompt: a list of {role, content} messages, or raw text; null: chosen and "
        "rejected are whole conversations."
    )
    chosen_key: Text = Field(description="Column with the preferred answer: text, or messages.")
    rejected_key: Text = Field(description="Column with the other answer.")
    margin_key: Text | None = Field(
        description="Column with a number by which the score of the chosen answer is to lead at least; null for none."
    )


class RMConfig(SupervisedConfig):
    """Everything that the training of a reward model reads."""

    data: RMDataConfig = Field(description="Pairs of answers, and batch sizes.")
    center_rewards_coefficient: float = Field(
        ge=0, description="Weight of the squared sum of both scores of a pair, which keeps scores around 0; 0: none."
    )

    def longest_row(self) -> int:
        """Tokens of the longest pair."""
        return 2 * self.data.max_length
