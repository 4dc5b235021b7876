"""The run folder of a model: its description, and one line of metrics for each optimizer step.

    history = History(folder, "2f9a:train:0", times, config)
    history.open()                                            # after a restart, it continues behind the last line
    history.add(loss, num_rows, num_tokens)
    history.write(12, learning_rate=1e-4, grad_norm=0.4)      # for command 12
    history.close("finished")

A command that is executed again after a crash has its line already. `camshaft view`, `compare` and `plot` read these
folders like those of other runs. From time to time, a line of the log says what the server has waited for.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camshaft.errors import CamshaftError
from camshaft.service.times import SessionTimes, Times
from camshaft.tracking import Ending, RunInfo, Tracking
from camshaft.tracking.console import format_number
from camshaft.tracking.record import RECORD
from camshaft.tracking.run_folder import METRICS, RunFolder

COMMAND = "train/command"
"""Metric with the number of the command of a step."""
PROJECT = "camshaft serve"
REPORT_SECONDS = 10.0
"""Interval at which a model in training is reported in the log."""

logger = logging.getLogger(__name__)


@dataclass
class _Batch:
    """Sums over the calls since the last step."""

    loss: float = 0.0
    num_calls: int = 0
    num_rows: int = 0
    num_tokens: int = 0


class History:
    """Metrics of one model. The thread of the training queue calls all methods."""

    def __init__(self, folder: Path, model_id: str, times: SessionTimes, config: Mapping[str, Any]):
        """`config` describes model and server."""
        self.folder, self.model_id, self.times, self.config = folder, model_id, times, config
        self._session = model_id.partition(":")[0]
        self._tracking: Tracking | None = None
        self._step = self._command = 0
        """Step and command of the last line."""
        self._batch = _Batch()
        self._since = Times()
        self._reported_at, self._reported = 0.0, (0, Times())
        """Time, step and times of the session of the last report."""

    def open(self) -> None:
        """Begin, or continue behind the last line. The gradients since the last step are added again."""
        if self._tracking is None:
            try:
                self._tracking = self._start()
            except (CamshaftError, OSError) as error:  # such as a full disk
                logger.warning("%s trains without %s: %s", self.model_id, self.folder / METRICS, error)
        self._batch, self._since = _Batch(), self.times.now(self._session)
        self._reported = self._step, self._since

    def _start(self) -> Tracking:
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics = RunFolder(self.folder).metrics  # of an earlier process
        metrics.poll()
        self._step, self._command = metrics.last_step, int(metrics.last(COMMAND) or 0)
        info = RunInfo(
            project=PROJECT,
            experiment=self.model_id,
            folder=self.folder,
            total_steps=0,
            resumed_step=self._step or None,
            config=self.config,
            command="serve",
        )
        return Tracking(["jsonl", RECORD], info)

    def add(self, loss: float, num_rows: int, num_tokens: int) -> None:
        """Add a call that has added gradients. `num_tokens` is the number of tokens that count."""
        batch = self._batch
        batch.loss, batch.num_calls = batch.loss + loss, batch.num_calls + 1
        batch.num_rows, batch.num_tokens = batch.num_rows + num_rows, batch.num_tokens + num_tokens

    def clear(self) -> None:
        """Forget the calls whose gradients have been discarded."""
        self._batch = _Batch()

    def write(self, command: int, learning_rate: float, grad_norm: float) -> None:
        """Write the line of an optimizer step, unless it has been written."""
        batch, self._batch = self._batch, _Batch()
        if command <= self._command or self._tracking is None:
            return
        now = self.times.now(self._session)
        times, self._since = now - self._since, now
        self._step, self._command = self._step + 1, command
        metrics = {
            "train/loss": batch.loss,
            "train/loss_per_token": batch.loss / max(batch.num_tokens, 1),
            "train/calls": batch.num_calls,
            "train/rows": batch.num_rows,
            "train/tokens": batch.num_tokens,
            "train/lr": learning_rate,
            "train/grad_norm": grad_norm,
            COMMAND: command,
            "timing_s/step": times.step,
            "timing_s/train": times.train,
            "timing_s/sample": times.sample,
            "timing_s/queue": times.queue,
            "timing_s/client": times.client,
            "perf/throughput": batch.num_tokens / max(times.step, 1e-9),
        }
        self._tracking.log(metrics, self._step)
        if time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._report(metrics, now)

    def _report(self, metrics: Mapping[str, float], now: Times) -> None:
        first, earlier = self._reported
        times = now - earlier
        parts = times.client, times.train, times.sample, times.queue
        logger.info(
            "%s  step %d  loss %s  tokens %s  grad %s  %s s per step: waited %.0f %% for the client, trained %.0f %%, "
            "sampled %.0f %%, waited %.0f %% in the queue",
            *(self.model_id, self._step),
            *(format_number(metrics[f"train/{name}"]) for name in ("loss", "tokens", "grad_norm")),
            format_number(times.step / max(self._step - first, 1)),
            *(100 * seconds / max(times.step, 1e-9) for seconds in parts),
        )
        self._reported_at, self._reported = time.monotonic(), (self._step, now)

    def close(self, ending: Ending) -> None:
        """Write how training has ended. It may continue."""
        if self._tracking is not None:
            self._tracking.ending = ending
            self._tracking.finish()
            self._tracking = None
