"""Metrics for Weights & Biases: `trainer.project_name` is the project, `trainer.experiment_name` the run's name.

    wandb login                     # or WANDB_API_KEY=..., once
    WANDB_MODE=offline camshaft ... # no account, no network; `wandb sync <folder>/wandb/offline-run-*` sends it later

The library's files are in `<folder>/wandb`. The id of the run is kept in the run's folder: a run that resumes continues
the same one. Steps that the killed run logged after its last checkpoint stay as they were logged.
"""

import logging
from collections.abc import Mapping, Sequence

import wandb
import wandb.sdk  # not there in a folder of that name, which runs leave behind and which Python takes for a package

from camshaft.errors import ConfigError
from camshaft.tracking.base import Ending, Row, RunInfo, Tracker
from camshaft.tracking.bounded import FINISH_SECONDS

_EXIT_CODE: dict[Ending, int] = {"finished": 0, "failed": 1, "stopped": 255}
"""wandb shows 255, with which it ends at Ctrl-C, as killed."""

logger = logging.getLogger(__name__)


class WandbTracker(Tracker):
    """Leaves the screen alone: where the run can be seen is a line of our own."""

    @classmethod
    def check(cls) -> None:
        """Without a key the library would ask for one on the screen."""
        settings = wandb.setup(settings=_settings()).settings
        if settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "the tracker 'wandb' has no account to log to. Type `wandb login`, or set WANDB_API_KEY; with "
                "WANDB_MODE=offline the run is kept on this machine, and `wandb sync` sends it later"
            )

    def __init__(self, run: RunInfo):
        self.check()
        self._exit_code = _EXIT_CODE["finished"]
        kept = run.kept_id("wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            id=kept,
            resume="allow",
            dir=run.place(""),
            config=dict(run.config),
            settings=_settings(),
        )
        run.keep_id("wandb", self._run.id)
        logger.info("wandb: %s", self._run.dir if self._run.offline else self._run.url)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, rows: Sequence[Row], step: int) -> None:
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"val/generations": table}, step=step)

    def ended(self, ending: Ending) -> None:
        self._exit_code = _EXIT_CODE[ending]

    def finish(self) -> None:
        self._run.finish(exit_code=self._exit_code)


def _settings() -> wandb.Settings:
    """Half of the time that the end of a run has is for the upload, and none is spent when Python exits."""
    limit = FINISH_SECONDS / 2
    return wandb.Settings(silent=True, console="off", finish_timeout=limit, finish_timeout_raises=True)
