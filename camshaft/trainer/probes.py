"""Probes of an asynchronous run: a few rows whose log-probs trainer and rollout compute with the same weights.

    probes.start(step, rows)        # after step b, whose rows have the log-probs of the trainer under version b - 1
    probes.collect(step - 1 - k)    # the metrics of a later step: the mismatch without staleness

The log-probs of a stale batch differ because its weights do, and this hides an error of the generator. A probe has no
such difference: when step b has computed its log-probs, and until the next weights are sent, the rollout holds version
b - 1, too. The call that scores the rows follows the generation of batch b + k. It has ended when a step waits for
batch b + k + 1, so the trainer never waits for it, and each step reports the same probe whatever the calls take.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from camshaft.controller import Pending, prepare_call, submit
from camshaft.dataproto import DataProto
from camshaft.errors import RolloutError
from camshaft.roles import RolloutWorker
from camshaft.trainer.metrics import mismatch

ROWS = 4
"""Number of rows of a probe."""
NAMES = {"rollout/log_prob_diff_mean": "async/probe_log_prob_diff_mean", "rollout/kl_k3": "async/probe_kl_k3"}


@dataclass(frozen=True)
class Probe:
    """Rows with the log-probs of the trainer, whose log-probs the rollout computes."""

    version: int
    rows: DataProto
    scored: Pending[DataProto]
    num_padding_rows: int

    def metrics(self) -> dict[str, float]:
        """Wait for the rollout, and compare its log-probs with those of the trainer."""
        scored = self.scored.result().unpad(self.num_padding_rows)
        versions = scored["policy_versions"].values.unique().tolist()
        if versions != [self.version]:
            raise RolloutError(
                f"the rollout has scored the probe of version {self.version} with versions {versions}; a role of the "
                "rollout must execute its calls in the order of submission"
            )
        is_scored = scored.ragged("response_mask").values
        mask = self.rows.ragged("response_mask").map(lambda mask: mask & is_scored)
        compared = self.rows.with_columns(rollout_log_probs=scored["rollout_log_probs"], response_mask=mask)
        measured = mismatch(compared)
        return {name: measured[key] for key, name in NAMES.items()} | {"async/probe_version": float(self.version)}


class Probes:
    """The probes that are under way, and the metrics of those that are done."""

    def __init__(self, rollout: RolloutWorker, dp_size: int):
        """Set `dp_size` to the number of shards into which the rollout splits rows."""
        self._rollout, self._dp_size = rollout, dp_size
        self._started: dict[int, Probe] = {}
        self._done: dict[int, dict[str, float]] = {}
        self._reported: list[int] = []
        """Those of `_done` whose metrics are in the step under way."""

    def prepare(self) -> None:
        """Call this before a batch is generated, so that `start` does not wait for it."""
        prepare_call(self._rollout.score_responses)

    def start(self, step: int, batch: DataProto) -> Pending[DataProto]:
        """Let the rollout score the first rows of `batch`, which have the log-probs of the trainer in this step."""
        rows = batch.select("prompts", "responses", "response_mask", "old_log_probs").reorder(slice(0, ROWS))
        padded, num_padding_rows = rows.select("prompts", "responses").pad_to_divisor(self._dp_size)
        scored = submit(self._rollout.score_responses, padded)
        self._started[step] = Probe(step - 1, rows, scored, num_padding_rows)
        return scored

    def collect(self, step: int) -> dict[str, float]:
        """Wait for the probes up to `step`, and return the metrics of the last one, or none.

        They are kept until the next call, because the step that reports them may be abandoned.
        """
        for number in self._reported:
            del self._done[number]
        self._end([number for number in self._started if number <= step])
        self._reported = [number for number in self._done if number <= step]
        return {name: value for number in self._reported for name, value in self._done[number].items()}

    def _end(self, steps: list[int]) -> None:
        self._done |= {step: self._started.pop(step).metrics() for step in steps}

    def state_dict(self, after: int) -> dict[str, dict[str, float]]:
        """Wait for the probes under way, and return the metrics of those later than step `after`, as JSON values."""
        self._end(list(self._started))
        return {str(step): metrics for step, metrics in self._done.items() if step > after}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done, self._reported = {int(step): dict(metrics) for step, metrics in state.items()}, []
