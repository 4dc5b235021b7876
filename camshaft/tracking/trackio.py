"""Metrics for Trackio: `trainer.project_name` is the project, `trainer.experiment_name` the run's name.

    trackio show --project my_project

Where they go is Trackio's to say: its folder on this machine (TRACKIO_DIR), a Space (TRACKIO_SPACE_ID) or a server
(TRACKIO_SERVER_URL). A run that resumes continues the same one; steps that the killed run logged after its last
checkpoint are there twice, with the same values.
"""

# Where the library is missing, a type checker takes this file for it.
# pyright: reportCallIssue=false

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence

from trackio import Table, init

from camshaft.tracking.base import Row, RunInfo, Tracker

logger = logging.getLogger(__name__)


class TrackioTracker(Tracker):
    """Holds on to its run: the library's own idea of the current one belongs to a thread."""

    def __init__(self, run: RunInfo):
        kept = run.kept_id("trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # it cannot be told to be quiet; the driver waits meanwhile
            self._run = init(
                project=run.project,
                name=kept or run.experiment,
                resume="never" if kept is None else "allow",
                config=dict(run.config),
                embed=False,
            )
        run.keep_id("trackio", self._run.name)
        logger.info("trackio: run %s of project %s; trackio show --project %s", self._run.name, *[run.project] * 2)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, rows: Sequence[Row], step: int) -> None:
        table = Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"val/generations": table}, step=step)

    def finish(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
