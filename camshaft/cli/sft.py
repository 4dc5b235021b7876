"""`camshaft sft`: supervised fine-tuning.

camshaft sft model=models/mine data=train.jsonl steps=100 lr=1e-5 out=runs/sft
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from camshaft.cli.usage import CONFIG_OPTIONS, asks_for_help, short_name_table
from camshaft.config import SFTConfig, compose

USAGE = f"""\
usage: camshaft sft key=value ...        supervised fine-tuning

{short_name_table(SFTConfig)}

Short names and keys can be mixed. A run requires model and data.
All keys: camshaft config show --trainer sft. One key: camshaft config explain --trainer sft KEY

{CONFIG_OPTIONS}
example:
  camshaft sft data.train_files=train.parquet data.val_files=null model.path=models/mine
"""


def main(argv: Sequence[str]) -> int:
    """Fine-tune a model with every config that `argv` describes, and return the largest exit status."""
    if asks_for_help(argv):
        sys.stdout.write(USAGE)
        return 0
    configs = compose(argv, SFTConfig)
    from camshaft.trainer.sft import SFTTrainer
    from camshaft.trainer.supervised import train_all

    return train_all(configs, SFTTrainer)
