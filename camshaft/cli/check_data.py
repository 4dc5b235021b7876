"""`camshaft check-data`: check the data and the reward function of a PPO run before it starts."""

from collections.abc import Sequence

from camshaft.cli.usage import print_help
from camshaft.config import PPOConfig, compose

USAGE = """\
usage: camshaft check-data key=value ...     check the data and the reward function of a PPO run

Accepts the same arguments as camshaft ppo. Loads the tokenizer, the data files and the reward function, but no model.
Reports the columns of the files, prompt lengths in tokens, overlong and duplicate prompts, and, for ten rows, the
rewards of the ground truth and of an empty response.

Exit status: 0 if the run can start, 1 if it cannot start or the reward function fails, 2 if the config is invalid.
"""


def main(argv: Sequence[str]) -> int:
    """Check every config that `argv` describes, and return the largest exit status."""
    if print_help(argv, USAGE):
        return 0
    configs = compose(argv, PPOConfig)
    from camshaft.trainer.check_data import check_data

    return max((check_data(config) for config in configs), default=0)
