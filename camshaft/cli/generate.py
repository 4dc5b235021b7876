"""`camshaft generate`: generate responses to the prompts of a data file."""

from collections.abc import Sequence

from camshaft.cli.prerequisites import prepare_runs
from camshaft.cli.usage import CONFIG_OPTIONS, print_help, short_name_table
from camshaft.config import GenerateConfig, compose

USAGE = f"""\
usage: camshaft generate key=value ...   generate responses to the prompts of a data file

{short_name_table(GenerateConfig)}

Required: model and data. out is ~/data/generated.parquet by default.
Run the same command again to resume an interrupted run.
All keys: camshaft config show --trainer generate. One key: camshaft config explain --trainer generate KEY

{CONFIG_OPTIONS}
example (the last line also scores the responses with built-in functions, selected by data_source):
  camshaft generate model=models/mine data=test.parquet out=responses.parquet n=8 \\
    custom_reward_function.name=auto
"""


def main(argv: Sequence[str]) -> int:
    """Generate the responses of every config that `argv` describes, and return the exit status."""
    if print_help(argv, USAGE):
        return 0
    for config in prepare_runs(compose(argv, GenerateConfig)):
        generate(config)
    return 0


def generate(config: GenerateConfig) -> None:
    """Generate the missing responses, write the output file, and print the scores if a function is configured."""
    from camshaft.config.auto.table import format_choices
    from camshaft.controller.placement import check_device
    from camshaft.tracking import Tracking
    from camshaft.tracking.console import shared_console
    from camshaft.tracking.terminal import log_to_console
    from camshaft.trainer.evaluate import score_table
    from camshaft.trainer.generate import GenerateRun

    console = shared_console()
    if config.trainer.backend() == "local":
        check_device(config.trainer.device, config.trainer.n_gpus_per_node)
    with log_to_console(console, config.trainer.seed):
        run = GenerateRun(config)
        if choices := format_choices(run.config):
            console.print(choices, markup=False, soft_wrap=True)
        file_exists = run.file.exists()
        if file_exists:
            run.file.remove_parts()  # a run that was killed after it wrote the file did not remove them
        else:
            with run, Tracking(["console"], run.info()) as tracking:
                run.generate(tracking)
                run.write()
        metrics = run.metrics()
        if metrics:
            console.print(score_table(metrics))
        prompts = f"{len(run.prompts)} prompts x {config.rollout.n}"
        result = "already written by this command" if file_exists else prompts
        console.print(f"{run.file.path}: {result}", markup=False, soft_wrap=True)
