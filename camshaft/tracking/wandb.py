"""Weights & Biases tracker: `trainer.project_name` is the project, `trainer.experiment_name` the run name.

    wandb login                     # or WANDB_API_KEY=..., once
    WANDB_MODE=offline camshaft ... # no account, no network; upload with `wandb sync <folder>/wandb/offline-run-*`

The library's files are in `<folder>/wandb`. The run id is saved in the run's folder, so that a resumed run continues
the same wandb run. Steps that a killed run logged after its last checkpoint are kept.
"""

import logging
from collections.abc import Mapping, Sequence

import wandb
import wandb.sdk  # fails if `wandb` is a folder that a run left behind, which Python imports as a namespace package

from camshaft.errors import ConfigError
from camshaft.tracking.base import Ending, Row, RunInfo, Tracker
from camshaft.tracking.bounded import FINISH_SECONDS

_EXIT_CODE: dict[Ending, int] = {"finished": 0, "failed": 1, "stopped": 255}
"""wandb shows exit code 255, which it uses for Ctrl-C, as killed."""

logger = logging.getLogger(__name__)


class WandbTracker(Tracker):
    """Log to wandb without its console output; the run's URL is logged instead."""

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if no API key is configured; the library would prompt for one."""
        settings = wandb.setup(settings=_settings()).settings
        if settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "the tracker 'wandb' has no account. Run `wandb login` or set WANDB_API_KEY, or use "
                "WANDB_MODE=offline to store the run locally and upload it later with `wandb sync`"
            )

    def __init__(self, run: RunInfo):
        self.check()
        self._exit_code = _EXIT_CODE["finished"]
        saved_id = run.kept_id("wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            id=saved_id,
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

    def on_run_end(self, ending: Ending) -> None:
        self._exit_code = _EXIT_CODE[ending]

    def finish(self) -> None:
        self._run.finish(exit_code=self._exit_code)


def _settings() -> wandb.Settings:
    """Limit the final upload to half of FINISH_SECONDS, so that it does not delay the interpreter's exit."""
    limit = FINISH_SECONDS / 2
    return wandb.Settings(silent=True, console="off", finish_timeout=limit, finish_timeout_raises=True)
