"""`camshaft rm`: train a reward model on preference pairs.

camshaft rm data.train_files=pairs.parquet model.path=models/tiny key=value ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from camshaft.cli.usage import CONFIG_OPTIONS, asks_for_help, short_name_table
from camshaft.config import RMConfig, compose

USAGE = f"""\
usage: camshaft rm key=value ...         train a reward model on preference pairs

{short_name_table(RMConfig)}

Short names and keys can be mixed. A run requires model and data.
All keys: camshaft config show --trainer rm. One key: camshaft config explain --trainer rm KEY

{CONFIG_OPTIONS}
example:
  camshaft rm model=models/mine data=pairs.jsonl steps=100 lr=1e-5 out=runs/rm
"""


def main(argv: Sequence[str]) -> int:
    """Train a reward model with every config that `argv` describes, and return the largest exit status."""
    if asks_for_help(argv):
        sys.stdout.write(USAGE)
        return 0
    configs = compose(argv, RMConfig)
    from camshaft.trainer.rm import RMTrainer
    from camshaft.trainer.supervised import train_all

    return train_all(configs, RMTrainer)
