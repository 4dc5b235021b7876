"""Metrics for MLflow: `trainer.project_name` is the experiment, `trainer.experiment_name` the run's name.

    MLFLOW_TRACKING_URI=http://server:5000 camshaft ...
    MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri checkpoints/my_project/my_run/mlruns

Without MLFLOW_TRACKING_URI the files are in `<folder>/mlruns`. The id of the run is kept in the run's folder: a run
that resumes continues the same one. MLflow takes nothing back, so steps that the killed run logged after its last
checkpoint stay as they were logged, and are not logged twice.
"""

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from camshaft.tracking.base import Ending, Row, RunInfo, Tracker

LAST_STEP = "camshaft.last_step"
"""The tag that says up to which step a run has metrics."""

_STATUS: dict[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_AT_ONCE = 100
"""Params that MLflow takes in one request."""

logger = logging.getLogger(__name__)


class MLflowTracker(Tracker):
    """Through a client of its own: no active run, which code of the user's may have."""

    def __init__(self, run: RunInfo):
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if not where:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it has all that is needed here
            where = run.place("mlruns").absolute().as_uri()
        self._client = MlflowClient(tracking_uri=where)
        self._status = _STATUS["finished"]
        kept = run.kept_id("mlflow")
        self._id = self._begin(run) if kept is None else kept
        self._last = int(self._client.get_run(self._id).data.tags.get(LAST_STEP, -1))
        self._client.update_run(self._id, status="RUNNING")
        run.keep_id("mlflow", self._id)
        logger.info("mlflow: run %s in %s", self._id, where)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step <= self._last:
            return
        now = int(time.time() * 1000)
        values = [Metric(metric_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values, tags=[RunTag(LAST_STEP, str(step))])

    def log_generations(self, rows: Sequence[Row], step: int) -> None:
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._client.log_dict(self._id, table, f"validation/step_{step}.json")

    def ended(self, ending: Ending) -> None:
        self._status = _STATUS[ending]

    def finish(self) -> None:
        self._client.set_terminated(self._id, self._status)

    def _begin(self, run: RunInfo) -> str:
        known = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if known is None else known.experiment_id
        made = self._client.create_run(experiment, run_name=run.experiment).info.run_id
        params = [Param(name, text) for name, text in _flat(run.config)]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(made, params=params[start : start + _AT_ONCE])
        return made


def metric_name(name: str) -> str:
    """As MLflow takes it: `mean@4` is `mean_at_4`, and what else is no letter, digit or one of `_-./: ` is `_`."""
    return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        name = metric_name(f"{above}{key}")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, default=str)
