"""Config of `camshaft eval`, which scores existing responses.

config = load_eval(["data.path=responses.parquet"])
config.custom_reward_function.function_name()          # "auto"
"""

from pydantic import Field

from camshaft.config.schema.fields import Path, Paths, Section, Text
from camshaft.config.schema.reward import CustomRewardConfig


class EvalDataConfig(Section):
    """Responses to score, and output files."""

    path: Paths = Field(description="Parquet files with responses, written by camshaft generate or another program.")
    prompt_key: Text = Field(
        description="Column with the prompt; groups the responses to one prompt if each row has a single response."
    )
    response_key: Text = Field(description="Column with the responses: a list of strings, or a string.")
    data_source_key: Text = Field(description="Column with the data source of a row.")
    reward_model_key: Text = Field(
        description="Column whose ground_truth entry is the reference answer; without it the column ground_truth is "
        "used."
    )
    score_key: Text = Field(description="Score column in output_path; the extracted answers are in <score_key>_pred.")
    pass_score: float = Field(description="Minimum score of a response that passes in pass@k.")
    output_path: Path | None = Field(description="Parquet file to write: all rows with their scores; null for none.")
    metrics_path: Path | None = Field(
        description="JSON file to write: the metrics of the printed table; null for none."
    )


class EvalConfig(Section):
    """All keys of `camshaft eval`."""

    data: EvalDataConfig = Field(description="Responses to score, and output files.")
    custom_reward_function: CustomRewardConfig = Field(description="Scoring function.")
