"""The whole config of `camshaft eval`: responses in, scores out, nothing generated.

config = load_eval(["data.path=responses.parquet"])
config.custom_reward_function.function_name()          # "auto"
"""

from pydantic import Field

from camshaft.config.schema.fields import Path, Paths, Section, Text
from camshaft.config.schema.reward import CustomRewardConfig


class EvalDataConfig(Section):
    """Which responses are scored, and where the scores go."""

    path: Paths = Field(description="Parquet files with the responses, those that camshaft generate writes or others.")
    prompt_key: Text = Field(
        description="Column with the prompt; read where a row has one response, to find those of one question."
    )
    response_key: Text = Field(description="Column with the responses to a row's prompt: a list of texts, or one text.")
    data_source_key: Text = Field(description="Column with the name of a row's data set.")
    reward_model_key: Text = Field(
        description="Column whose entry ground_truth a response is compared with; else the column ground_truth is."
    )
    score_key: Text = Field(
        description="Column of the scores in output_path; with _pred behind it that of the answers."
    )
    pass_score: float = Field(description="A response with this score or more counts as passed in pass@k.")
    output_path: Path | None = Field(description="Parquet file to write: all rows with their scores; null for none.")
    metrics_path: Path | None = Field(description="JSON file to write, with the numbers of the table; null for none.")


class EvalConfig(Section):
    """Everything that `camshaft eval` reads."""

    data: EvalDataConfig = Field(description="Which responses are scored, and where the scores go.")
    custom_reward_function: CustomRewardConfig = Field(description="What scores them.")
