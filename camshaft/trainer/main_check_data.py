"""Data and scoring function of an RL run, looked at before it starts.

    python -m camshaft.trainer.main_check_data data.train_files=train.parquet ... key=value ...

The keys are those of `camshaft ppo`, and all that it needs must be there: the words of a run can be tried as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from camshaft.config import PPOConfig, run_with_hydra

USAGE = """\
usage: camshaft check-data key=value ...     look at data and scoring function before a run

Takes the words of camshaft ppo, and loads neither models nor generators. Says which columns the files have, how long
the prompts are in tokens, what happens to those that are too long, how many are there twice, and what the scoring
function gives for the ground truth of ten rows and for nothing. Exit status 0: a run would start; 1: it would not, or
the function fails; 2: the config is wrong.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the config from the command line and look; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        sys.stdout.write(USAGE)
        return 0
    return run_with_hydra(words, "ppo_trainer", PPOConfig, _check)


def _check(config: PPOConfig) -> int:
    from camshaft.trainer.check_data import run_check

    return run_check(config)


if __name__ == "__main__":
    sys.exit(main())
