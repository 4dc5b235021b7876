"""Table of the runs of a sweep.

with table_of_runs() as folders:
    for config in compose(argv, SFTConfig):
        folders.append(config.trainer.default_local_dir)
        run(config, SFTTrainer)
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from camshaft.tracking.run_folder import RunFolder


@contextlib.contextmanager
def table_of_runs() -> Iterator[list[str]]:
    """Yield a list for run folders. At the end, also of a failed run, print a table if there are several.

    The table shows the keys in which the runs differ, their state and their results.
    """
    folders: list[str] = []
    try:
        yield folders
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                Path(folder).rmdir()  # empty, because the run could not start
        runs = [RunFolder(folder) for folder in folders if Path(folder).is_dir()]
        if len(runs) > 1:
            from camshaft.view.text import runs_table

            sys.stdout.write(f"\n{runs_table(runs, time.time())}\n")
