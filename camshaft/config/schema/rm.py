"""Config of `camshaft rm`, which trains a reward model."""

from pydantic import Field

from camshaft.config.schema.fields import Text
from camshaft.config.schema.supervised import SupervisedConfig, SupervisedDataConfig


class RMDataConfig(SupervisedDataConfig):
    """Preference pairs, and batch sizes in pairs."""

    prompt_key: Text | None = Field(
        description="Column with the prompt: a list of {role, content} messages, or a string; null: chosen and "
        "rejected contain whole conversations."
    )
    chosen_key: Text = Field(description="Column with the chosen response: a string, or messages.")
    rejected_key: Text = Field(description="Column with the rejected response: a string, or messages.")
    margin_key: Text | None = Field(
        description="Column with the margin by which the chosen score should exceed the rejected score; null for none."
    )


class RMConfig(SupervisedConfig):
    """All keys of `camshaft rm`."""

    data: RMDataConfig = Field(description="Preference pairs, and batch sizes.")
    center_rewards_coefficient: float = Field(
        ge=0, description="Coefficient of the squared sum of a pair's scores, which centers scores at 0; 0 disables it."
    )

    def longest_row(self) -> int:
        """Return the maximum number of tokens of a pair."""
        return 2 * self.data.max_length
