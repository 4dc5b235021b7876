"""Weights & Biases tracker: `trainer.project_name` is the project, and `trainer.experiment_name` is the run name.

    wandb login                      # once, or set WANDB_API_KEY
    WANDB_MODE=offline camshaft ...  # requires no account; upload with `wandb sync <folder>/wandb/offline-run-*`

wandb writes its files to `<folder>/wandb`. The ID of the wandb run is saved in the folder, so that a resumed run
continues the same wandb run. Steps that a killed run logged after its last checkpoint are kept.
"""

import logging
import sys
from collections.abc import Mapping, Sequence

import wandb
import wandb.sdk  # fails if `wandb` is only a folder with run files, which Python imports as a namespace package

from camshaft.errors import ConfigError
from camshaft.masking import mask_arguments
from camshaft.tracking.base import Ending, Row, RunInfo, Tracker
from camshaft.tracking.bounded import FINISH_SECONDS

_EXIT_CODE: dict[Ending, int] = {"finished": 0, "failed": 1, "stopped": 255}
"""Exit code of the wandb run. wandb shows 255, its code for Ctrl-C, as killed."""

logger = logging.getLogger(__name__)


class WandbTracker(Tracker):
    """Log to wandb without its console output. Only the URL of the run is logged."""

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if no API key is configured, because wandb would prompt for one."""
        settings = wandb.setup(settings=_settings()).settings
        if settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "the tracker 'wandb' requires an API key. Run `wandb login` or set WANDB_API_KEY, or set "
                "WANDB_MODE=offline to store the run locally and upload it later with `wandb sync`"
            )

    def __init__(self, run: RunInfo):
        self.check()
        self._exit_code = _EXIT_CODE["finished"]
        saved_id = run.load_run_id("wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            id=saved_id,
            resume="allow",
            dir=run.path(""),
            config=dict(run.config),
            settings=_settings(),
        )
        run.save_run_id("wandb", self._run.id)
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
    """Return settings that limit the final upload to half of FINISH_SECONDS, so that the process exits in time.

    wandb stores the command line with the description of the machine. Both are left out if an argument is a secret.
    """
    limit, has_secrets = FINISH_SECONDS / 2, mask_arguments(sys.argv) != sys.argv
    return wandb.Settings(
        silent=True,
        console="off",
        finish_timeout=limit,
        finish_timeout_raises=True,
        x_disable_meta=has_secrets,
    )
