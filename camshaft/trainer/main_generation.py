"""Responses to the prompts of a parquet file.

    python -m camshaft.trainer.main_generation data.path=in.parquet data.output_path=out.parquet model.path=... ...

All keys: `camshaft config show --trainer generate`. A run that was stopped goes on when it is started again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from camshaft.config import GenerateConfig, run_with_hydra


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the config from the command line and run; returns the exit status."""
    return run_with_hydra(list(sys.argv[1:] if argv is None else argv), "generation", GenerateConfig, run_generate)


def run_generate(config: GenerateConfig) -> int:
    """One run. Nothing heavy is imported before the config was found good."""
    from rich.console import Console

    from camshaft.tracking import Tracking
    from camshaft.trainer.generate import GenerateRun
    from camshaft.trainer.score_table import score_table
    from camshaft.trainer.session import check_device, logged

    console = Console(highlight=False)
    if config.trainer.backend() == "local":
        check_device(config.trainer.device, config.trainer.n_gpus_per_node)
    with logged(console, config.trainer.seed):
        run = GenerateRun(config)
        done = run.file.is_there()
        if done:
            run.file.remove_parts()  # of a run that was stopped between writing the one and removing the others
        else:
            with run, Tracking(["console"], run.info()) as tracking:
                run.generate(tracking)
                run.write()
        metrics = run.metrics()
        if metrics:
            console.print(score_table(metrics))
        said = (
            "was written by this command before" if done else f"{len(run.prompts)} prompts with {config.rollout.n} each"
        )
        console.print(f"{run.file.path}: {said}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
