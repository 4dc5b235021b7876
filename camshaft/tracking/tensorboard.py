"""Metrics for TensorBoard: event files in `<folder>/tensorboard`.

    tensorboard --logdir checkpoints/my_project

A run that resumes tells TensorBoard to forget the steps after the one it resumes from, so that each step is there
once; a run from the start puts older files aside.
"""

import json
from collections.abc import Mapping, Sequence

import tensorboard  # noqa: F401  (torch names it when it is missing; this line does so in our words)
from torch.utils.tensorboard import SummaryWriter

from camshaft.tracking.base import Row, RunInfo, Tracker, put_aside


class TensorBoardTracker(Tracker):
    """Writes each step through to the file, so that a killed run has lost nothing."""

    def __init__(self, run: RunInfo):
        folder = run.place("tensorboard")
        purge_step = None if run.resumed_step is None else run.resumed_step + 1
        if purge_step is None and folder.exists():
            put_aside(folder)
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._text("config", json.dumps(run.config, indent=2, default=str), run.resumed_step or 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_generations(self, rows: Sequence[Row], step: int) -> None:
        text = "\n\n".join("\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows)
        self._text("val/generations", text, step)

    def finish(self) -> None:
        self._writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        """As it is: TensorBoard reads Markdown, where four spaces begin what is not to be read."""
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)
