"""Supervised fine-tuning.

    python -m camshaft.trainer.main_sft data.train_files=train.parquet model.path=... key=value ...

All keys: `camshaft config show --trainer sft`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from camshaft.config import SFTConfig, run_with_hydra


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the config from the command line and run; returns the exit status."""
    return run_with_hydra(list(sys.argv[1:] if argv is None else argv), "sft_trainer", SFTConfig, run_sft)


def run_sft(config: SFTConfig) -> int:
    """One run. Nothing heavy is imported before the config was found good."""
    from camshaft.trainer.sft import SFTTrainer
    from camshaft.trainer.supervised import run

    return run(config, SFTTrainer)


if __name__ == "__main__":
    sys.exit(main())
