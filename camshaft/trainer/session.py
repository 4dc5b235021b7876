"""What surrounds a run of either trainer: logging, threads, errors told in one message, trackers.

with session(config.trainer) as run:
    ...
    with run.tracking(config, total_steps, saved) as tracking: ...
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.logging import RichHandler

from camshaft.checkpoint import Saved
from camshaft.config import PPOConfig, SFTConfig
from camshaft.config.sft import SFTTrainerConfig
from camshaft.config.trainer import TrainerConfig
from camshaft.tracking import RunInfo, Tracking


class Session:
    """The screen and the trackers of one run."""

    def __init__(self, trainer: TrainerConfig | SFTTrainerConfig):
        self.trainer = trainer
        self.console = Console(highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def tracking(self, config: PPOConfig | SFTConfig, total_steps: int, saved: Saved | None) -> Tracking:
        trainer = self.trainer
        info = RunInfo(
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            folder=Path(trainer.default_local_dir),
            total_steps=total_steps,
            resumed_step=None if saved is None else saved.step,
            config=config.model_dump(),
        )
        return Tracking(trainer.logger, info)


@contextlib.contextmanager
def session(trainer: TrainerConfig | SFTTrainerConfig) -> Iterator[Session]:
    """Log records go to the screen; the run's seed is set where a library draws without being told one."""
    run = Session(trainer)
    handler = RichHandler(console=run.console, show_path=False, rich_tracebacks=False)
    root = logging.getLogger("camshaft")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    torch.manual_seed(trainer.seed)
    try:
        yield run
    finally:
        root.removeHandler(handler)
