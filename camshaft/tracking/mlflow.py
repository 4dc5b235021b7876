"""MLflow tracker: `trainer.project_name` is the MLflow experiment, and `trainer.experiment_name` is the run name.

    MLFLOW_TRACKING_URI=http://server:5000 camshaft ...
    MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri checkpoints/my_project/my_run/mlruns

Without MLFLOW_TRACKING_URI, files are written to `<folder>/mlruns`. The ID of the MLflow run is saved in the folder, so
that a resumed run continues the same MLflow run. Steps that a killed run logged after its last checkpoint cannot be
deleted in MLflow, so a resumed run does not log them again.
"""

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from camshaft.config.tree import flatten
from camshaft.tracking.base import Ending, Row, RunInfo, Tracker

LAST_STEP = "camshaft.last_step"
"""Tag that contains the last logged step."""

_STATUS: dict[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_PARAMS_PER_REQUEST = 100

logger = logging.getLogger(__name__)


class MLflowTracker(Tracker):
    """Log with a separate MLflow client, so that an active run of user code is not affected."""

    def __init__(self, run: RunInfo):
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the file store supports all required features
            uri = run.path("mlruns").absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        self._status = _STATUS["finished"]
        saved_id = run.load_run_id("mlflow")
        self._id = self._begin(run) if saved_id is None else saved_id
        self._last = int(self._client.get_run(self._id).data.tags.get(LAST_STEP, -1))
        self._client.update_run(self._id, status="RUNNING")
        run.save_run_id("mlflow", self._id)
        logger.info("mlflow: run %s in %s", self._id, uri)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step <= self._last:
            return
        now = int(time.time() * 1000)
        values = [Metric(metric_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values, tags=[RunTag(LAST_STEP, str(step))])

    def log_generations(self, rows: Sequence[Row], step: int) -> None:
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._client.log_dict(self._id, table, f"validation/step_{step}.json")

    def on_run_end(self, ending: Ending) -> None:
        self._status = _STATUS[ending]

    def finish(self) -> None:
        self._client.set_terminated(self._id, self._status)

    def _begin(self, run: RunInfo) -> str:
        existing = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if existing is None else existing.experiment_id
        run_id = self._client.create_run(experiment, run_name=run.experiment).info.run_id
        values = {metric_name(key): value for key, value in flatten(run.config, ()).items()}
        params = [
            Param(name, value if isinstance(value, str) else json.dumps(value, default=str))
            for name, value in values.items()
        ]
        for start in range(0, len(params), _PARAMS_PER_REQUEST):
            self._client.log_batch(run_id, params=params[start : start + _PARAMS_PER_REQUEST])
        return run_id


def metric_name(name: str) -> str:
    """Convert a metric name to a valid MLflow name: `@` becomes `_at_`, other invalid characters become `_`."""
    return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"), flags=re.ASCII)
