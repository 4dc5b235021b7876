"""Trackio tracker: `trainer.project_name` is the project, and `trainer.experiment_name` is the run name.

    trackio show --project my_project

Environment variables of Trackio select the destination: a local folder (TRACKIO_DIR), a Space (TRACKIO_SPACE_ID) or a
server (TRACKIO_SERVER_URL). A resumed run continues the same Trackio run. Steps that a killed run logged after its last
checkpoint are logged again with the same values.
"""

# Without the library, the type checker resolves `trackio` to this file.
# pyright: reportCallIssue=false

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence

from trackio import Table, init

from camshaft.tracking.base import Row, RunInfo, Tracker

logger = logging.getLogger(__name__)


class TrackioTracker(Tracker):
    """Log with an explicit run object, because the current run of Trackio is thread-local."""

    def __init__(self, run: RunInfo):
        saved_id = run.load_run_id("trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # the library has no quiet option
            self._run = init(
                project=run.project,
                name=saved_id or run.experiment,
                resume="never" if saved_id is None else "allow",
                config=dict(run.config),
                embed=False,
            )
        run.save_run_id("trackio", self._run.name)
        logger.info("trackio: run %s of project %s; trackio show --project %s", self._run.name, *[run.project] * 2)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, rows: Sequence[Row], step: int) -> None:
        table = Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"val/generations": table}, step=step)

    def finish(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
