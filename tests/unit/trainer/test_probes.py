"""Probes at equal weights: their numbers, when they are reported, and a rollout with other weights."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from camshaft.controller import Dispatch, Worker, register, workers
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import RolloutError
from camshaft.trainer.probes import ROWS, Probes

MASK = [[True, False, True], [True]]


class Scorer(Worker):
    """Returns stored log-probs under a version that a call sets."""

    version, last, is_last_scored = 0, -2.0, True
    """`last` is the log-prob of the last token of longer responses."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_version(self, version: int) -> None:
        self.version = version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_last(self, log_prob: float, is_scored: bool) -> None:
        self.last, self.is_last_scored = log_prob, is_scored

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score_responses(self, rows: DataProto) -> DataProto:
        stored = [[-1.5, -9.0, self.last], [-1.0]]
        scored = Ragged.from_rows([stored[len(row) == 1] for row in rows.ragged("responses").rows()], torch.float32)
        versions = scored.map(lambda values: torch.full_like(values, self.version, dtype=torch.int32))
        mask = scored.like((scored.positions() < 2) | self.is_last_scored)
        return DataProto.from_dict({"rollout_log_probs": scored, "response_mask": mask, "policy_versions": versions})


@pytest.fixture
def scorer() -> Iterator[Any]:
    with workers(Scorer) as group:
        yield group


def batch(repeats: int = 1) -> DataProto:
    rows = DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[1], [2, 3]]),
            "responses": Ragged.from_rows([[4, 5, 6], [7]]),
            "response_mask": Ragged.from_rows(MASK),
            "old_log_probs": Ragged.from_rows([[-1.0, 0.0, -2.0], [-1.25]], torch.float32),
        }
    )
    return DataProto.concat([rows] * repeats)


@pytest.mark.parametrize("dp_size", [1, 3])
def test_a_probe_compares_sampled_tokens(dp_size: int, scorer: Any) -> None:
    probes = Probes(scorer, dp_size)
    probes.start(1, batch())
    metrics = probes.collect(1)
    # The counted differences are 0.5, 0 and 0.25.
    assert metrics["async/probe_log_prob_diff_mean"] == pytest.approx((0.5 + 0 + 0.25) / 3)
    assert metrics["async/probe_version"] == 0.0


def test_tokens_that_are_not_scored_do_not_count_and_nan_does(scorer: Any) -> None:
    probes = Probes(scorer, 1)
    scorer.set_last(0.0, False)
    probes.start(1, batch())
    assert probes.collect(1)["async/probe_log_prob_diff_mean"] == pytest.approx((0.5 + 0.25) / 2)
    scorer.set_last(math.nan, True)
    probes.start(1, batch())
    assert math.isnan(probes.collect(1)["async/probe_log_prob_diff_mean"])


def test_a_probe_is_reported_once_and_in_its_step(scorer: Any) -> None:
    probes = Probes(scorer, 1)
    for step in (1, 2, 3):
        scorer.set_version(step - 1)
        probes.start(step, batch(ROWS))
    assert probes.collect(0) == {}
    assert probes.collect(2)["async/probe_version"] == 1.0  # that of step 1 is older
    assert probes.collect(2) == {}
    resumed = Probes(scorer, 1)
    resumed.load_state_dict(probes.state_dict(after=2))
    assert resumed.collect(2) == {}
    assert resumed.collect(3) == probes.collect(3) != {}


def test_a_probe_that_an_abandoned_step_reports_stays_in_the_state(scorer: Any) -> None:
    probes = Probes(scorer, 1)
    probes.start(1, batch())
    reported = probes.collect(1)
    assert probes.state_dict(after=0) == {"1": reported}
    assert probes.state_dict(after=1) == {}


def test_a_rollout_with_another_version_is_an_error(scorer: Any) -> None:
    probes = Probes(scorer, 1)
    scorer.set_version(4)
    probes.start(4, batch())
    with pytest.raises(RolloutError, match=r"the probe of version 3 with versions \[4\]"):
        probes.collect(4)
