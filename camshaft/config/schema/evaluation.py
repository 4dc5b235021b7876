"""Config of `camshaft eval`, a command that scores existing responses.

config = load_eval(["data.path=responses.parquet"])
config.custom_reward_function.selected()[0].name       # "auto"
"""

from camshaft.config.schema.fields import CommandConfig, Path, Paths, Section, Text, key, section
from camshaft.config.schema.reward import CustomRewardConfig


class EvalDataConfig(Section):
    path: Paths = key(
        "~/data/generated.parquet",
        "Data files with responses to score, written by camshaft generate or by another program: a path, folder, "
        "glob pattern or URL, or a list of them.",
        short=("data", "responses"),
    )
    prompt_key: Text = key(
        "prompt",
        "Column that contains the prompt. If each row holds a single response, rows with the same prompt form a "
        "group for pass@k.",
    )
    response_key: Text = key(
        "responses", "Column that contains the responses, either a list of strings or a single string."
    )
    data_source_key: Text = key("data_source", "Column that contains the data source of each row.")
    reward_model_key: Text = key(
        "reward_model",
        "Column of structs whose ground_truth entry is the reference answer. If the column is missing, the column "
        "ground_truth is used.",
    )
    score_key: Text = key(
        "score",
        "Column of output_path to write the scores to. Extracted answers are written to the column <score_key>_pred.",
    )
    pass_score: float = key(1.0, "Minimum score at which a response counts as passed in pass@k.")
    output_path: Path | None = key(
        None,
        "Parquet file to write all rows and their scores to. null writes no file.",
        short=("out", "parquet file for the scores"),
    )
    metrics_path: Path | None = key(None, "JSON file for the metrics of the printed table. null writes no file.")


class EvalConfig(CommandConfig):
    """All keys of `camshaft eval`."""

    data: EvalDataConfig = section("Responses to score, and output files.")
    custom_reward_function: CustomRewardConfig = section("Scoring function.")
