"""Train a reward model on pairs of answers.

    python -m camshaft.trainer.main_rm data.train_files=pairs.parquet model.path=... key=value ...

All keys: `camshaft config show --trainer rm`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from camshaft.config import RMConfig, run_with_hydra


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the config from the command line and run; returns the exit status."""
    return run_with_hydra(list(sys.argv[1:] if argv is None else argv), "rm_trainer", RMConfig, run_rm)


def run_rm(config: RMConfig) -> int:
    """One run. Nothing heavy is imported before the config was found good."""
    from camshaft.trainer.rm import RMTrainer
    from camshaft.trainer.supervised import run

    return run(config, RMTrainer)


if __name__ == "__main__":
    sys.exit(main())
