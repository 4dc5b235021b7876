"""Scores of the responses in a parquet file.

    python -m camshaft.trainer.main_eval data.path=responses.parquet custom_reward_function.path=my_reward.py

All keys: `camshaft config show --trainer eval`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from camshaft.config import EvalConfig, run_with_hydra


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the config from the command line and score; returns the exit status."""
    return run_with_hydra(list(sys.argv[1:] if argv is None else argv), "evaluation", EvalConfig, run_eval)


def run_eval(config: EvalConfig) -> int:
    """Nothing heavy is imported before the config was found good."""
    from rich.console import Console

    from camshaft.trainer.evaluate import evaluate
    from camshaft.trainer.score_table import score_table
    from camshaft.trainer.session import logged

    console = Console(highlight=False)
    with logged(console, seed=0):
        metrics = evaluate(config)
    console.print(score_table({name: value for name, value in metrics.items() if "/reward/" in name}))
    for path in (config.data.metrics_path, config.data.output_path):
        if path is not None:
            console.print(f"{path}: written", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
