"""`camshaft eval`: score the responses of a data file."""

from collections.abc import Sequence

from camshaft.cli.usage import CONFIG_OPTIONS, print_help, short_name_table
from camshaft.config import EvalConfig, compose

USAGE = f"""\
usage: camshaft eval key=value ...       score responses: mean@n, best@k, maj@k and pass@k of each data source

{short_name_table(EvalConfig)}

Usual keys:
  data.path=FILE                       responses (default: ~/data/generated.parquet, from camshaft generate)
  custom_reward_function.path=FILE     or custom_reward_function.name=gsm8k (default: chosen by data_source)
Optional outputs:
  data.metrics_path=FILE.json          metrics
  data.output_path=FILE.parquet        all rows with their scores
All keys: camshaft config show --trainer eval. One key: camshaft config explain --trainer eval KEY

{CONFIG_OPTIONS}
example:
  camshaft eval data.path=responses.parquet custom_reward_function.path=my_reward.py
"""


def main(argv: Sequence[str]) -> int:
    """Score the responses of every config that `argv` describes, and return the exit status."""
    if print_help(argv, USAGE):
        return 0
    for config in compose(argv, EvalConfig):
        score(config)
    return 0


def score(config: EvalConfig) -> None:
    """Score the responses, print the metrics as a table, and write the output files."""
    from rich.console import Console

    from camshaft.tracking.terminal import log_to_console
    from camshaft.trainer.evaluate import evaluate, score_table

    console = Console(highlight=False)
    with log_to_console(console, seed=0):
        metrics = evaluate(config)
    console.print(score_table({name: value for name, value in metrics.items() if "/reward/" in name}))
    for path in (config.data.metrics_path, config.data.output_path):
        if path is not None:
            console.print(f"{path}: written", markup=False, soft_wrap=True)
