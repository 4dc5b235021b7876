"""TensorBoard tracker: writes event files to `<folder>/tensorboard`.

    tensorboard --logdir checkpoints/my_project

A resumed run sets `purge_step`, so that TensorBoard discards the steps after the checkpoint. A new run renames an
existing folder.
"""

import json
from collections.abc import Mapping, Sequence

import tensorboard  # noqa: F401  (report a missing library before torch imports it)
from torch.utils.tensorboard import SummaryWriter

from camshaft.storage import rename_existing
from camshaft.tracking.base import Row, RunInfo, Tracker


class TensorBoardTracker(Tracker):
    """Write event files and flush them after each step."""

    def __init__(self, run: RunInfo):
        folder = run.path("tensorboard")
        purge_step = None if run.resumed_step is None else run.resumed_step + 1
        if purge_step is None and folder.exists():
            rename_existing(folder)
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
        """Write text as a Markdown code block, because TensorBoard renders Markdown."""
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)
