"""Numbers of runs without a name, and the table of the runs of a sweep.

with numbered_runs(configs) as runs:
    for config in runs:
        run(config, SFTTrainer)
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from camshaft.config import PPOConfig, SupervisedConfig
from camshaft.config.run_folder import number_run
from camshaft.tracking.run_folder import RunFolder

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)


@contextlib.contextmanager
def numbered_runs(configs: Sequence[Config]) -> Iterator[Iterator[Config]]:
    """Yield the configs one after the other, each with a number in place of the placeholder of its run folder.

    At the end, also of a failed run, folders that were created for a number are removed if they are empty. If there are
    several runs, a table shows the keys in which they differ, their state and their results.
    """
    folders: dict[Path, bool] = {}
    """Folders of the runs that started, and whether they were created for a number."""

    def start() -> Iterator[Config]:
        for config in configs:
            numbered = number_run(config)
            folders[Path(numbered.trainer.default_local_dir)] = numbered is not config
            yield numbered

    try:
        yield start()
    finally:
        for folder, is_created in folders.items():
            if is_created:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # fails unless the run could not start
        runs = [RunFolder(folder) for folder in folders if folder.is_dir()]
        if len(runs) > 1:
            from camshaft.view.text import runs_table

            sys.stdout.write(f"\n{runs_table(runs, time.time())}\n")
