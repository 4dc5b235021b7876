"""`camshaft ppo`: train with PPO, GRPO and related algorithms.

`python -m camshaft.trainer.main_ppo` is the same command.
"""

from collections.abc import Sequence

from camshaft.cli.prerequisites import prepare_runs
from camshaft.cli.restarts import restarting
from camshaft.cli.sweep import numbered_runs
from camshaft.cli.usage import CONFIG_OPTIONS, algorithm_names, print_help, short_name_table
from camshaft.config import PPOConfig, compose
from camshaft.errors import ConfigError
from camshaft.stop import ENDED_BY_SIGNAL, Stop

USAGE = f"""\
usage: camshaft ppo key=value ...        train with PPO, GRPO and related algorithms

{short_name_table(PPOConfig)}
{algorithm_names()}
Short names and keys can be mixed. A run requires model and data, and reward unless a built-in function scores the data.
All keys: camshaft config show. One key: camshaft config explain KEY

{CONFIG_OPTIONS}
example: camshaft ppo model=models/tiny data=train.jsonl reward=my_reward.py algorithm=grpo steps=60 lr=1e-5
"""


def main(argv: Sequence[str]) -> int:
    """Train with every config that `argv` describes, one after another, and return the largest exit status.

    If a signal stops a run, the remaining runs of a sweep are not started. If `trainer.max_restarts` allows it, a run
    whose workers or machines have failed resumes when this process ends.
    """
    if print_help(argv, USAGE):
        return 0
    status, configs = 0, compose(argv, PPOConfig)
    if len(configs) > 1 and any(config.trainer.max_restarts for config in configs):
        raise ConfigError(
            "trainer.max_restarts: a sweep cannot be restarted; omit the key, or start its runs one by one"
        )
    with numbered_runs(prepare_runs(configs)) as runs:
        for config in runs:
            from camshaft.planning.memory_error import explain_memory_errors
            from camshaft.planning.micro_batches import fit_micro_batches, limits_as_overrides
            from camshaft.trainer import ppo_trainer
            from camshaft.trainer.loop import run
            from camshaft.trainer.session import Extensions

            fitted, stop = fit_micro_batches(config), Stop()
            outcome = 1  # of a run that has failed, and whose command runs again
            explained = explain_memory_errors(fitted, [*argv, *limits_as_overrides(fitted)])
            with restarting(fitted, argv, stop), explained:
                outcome = run(fitted, ppo_trainer(fitted).open, Extensions(stop=stop))
            status = max(status, outcome, stop.status)
            if status > ENDED_BY_SIGNAL:
                break
    return status
