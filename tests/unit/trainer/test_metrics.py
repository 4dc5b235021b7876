import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from camshaft.controller import Dispatch, PoolSpec, Worker, pools, register, spawn, submit
from camshaft.dataproto import DataProto, Ragged
from camshaft.tracking.record import RunStatus
from camshaft.trainer.metrics import (
    RankTimes,
    StepMetrics,
    batch_metrics,
    learned_lengths,
    mismatch,
    mismatch_by_age,
    reduce_calls,
    reduce_ranks,
    score_metrics,
)


def floats(*rows: list[float]) -> Ragged:
    return Ragged.from_rows(list(rows), dtype=torch.float32)


def two_rows(**more: Any) -> DataProto:
    """Build a response of three tokens, the second from a tool, and a truncated response of one token."""
    columns = {
        "prompts": Ragged.from_rows([[1, 2], [3, 4, 5, 6]]),
        "uid": ["0/1", "0/2"],
        "data_source": ["sums", "sums"],
        "responses": Ragged.from_rows([[7, 8, 9], [7]]),
        "response_mask": Ragged.from_rows([[True, False, True], [True]]),
        "finished": torch.tensor([True, False]),
        "token_level_scores": floats([0, 0, 1], [3]),
        "token_level_rewards": floats([-1, 0, 1], [2]),
        "advantages": floats([0.5, 99, -0.5], [1.5]),
        "returns": floats([1, 99, 2], [6]),
        "old_log_probs": floats([-1.0, -5.0, -2.0], [-3.0]),
        "rollout_log_probs": floats([-1.1, 0.0, -1.6], [-3.2]),
    }
    return DataProto.from_dict(columns | more)


def test_metrics_count_rows_and_policy_tokens() -> None:
    metrics = batch_metrics(two_rows(entropy=floats([1, 99, 2], [6])))
    expected = {
        "critic/score/mean": 2, "critic/score/max": 3, "critic/score/min": 1,
        "critic/score/p10": 1.2, "critic/score/p50": 2, "critic/score/p90": 2.8, "critic/score/sums/mean": 2,
        "critic/rewards/mean": 1, "critic/rewards/max": 2, "critic/rewards/min": 0,
        "critic/advantages/mean": 0.5, "critic/advantages/max": 1.5, "critic/advantages/min": -0.5,
        "critic/returns/mean": 3, "critic/returns/max": 6, "critic/returns/min": 1,
        "response_length/mean": 2, "response_length/max": 3, "response_length/min": 1,
        "prompt_length/mean": 3, "prompt_length/max": 4, "prompt_length/min": 2,
        "response_length/clip_ratio": 0.5,
        "actor/entropy": 3,
    }  # fmt: skip
    policy_metrics = {name: value for name, value in metrics.items() if not name.startswith("rollout/")}
    assert policy_metrics == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "explained"),
    [
        (floats([1, 0, 2], [6]), 1.0),  # a perfect critic; the tool's token does not count
        (floats([3, 0, 3], [3]), 0.0),  # one that predicts only the mean
        # errors -1, 1, 0: variance 1; returns 1, 2, 6: variance 7
        (floats([2, 0, 1], [6]), 1 - 1 / 7),
    ],
)
def test_explained_variance_of_the_critic(values: Ragged, explained: float) -> None:
    assert batch_metrics(two_rows(values=values))["critic/vf_explained_var"] == pytest.approx(explained)


def test_constant_returns_have_no_explained_variance() -> None:
    metrics = batch_metrics(two_rows(values=floats([1, 0, 2], [3]), returns=floats([4, 0, 4], [4])))
    assert math.isnan(metrics["critic/vf_explained_var"])


def test_mismatch_matches_hand_worked_numbers() -> None:
    # d = 0.1 and -0.4 in the first row, 0.2 in the second; the tool's token does not count.
    # k3: 0.1051709-0.1, 0.6703200-0.6, 1.2214028-1.2, that is 0.0051709, 0.0703200, 0.0214028.
    # Sequence weights: exp(-0.3) = 0.7408182 and exp(0.2) = 1.2214028; share (sum)^2 / (2 sum of squares).
    # With the first at 0.05, two of the three exceed 0.1.
    report = mismatch(two_rows(rollout_log_probs=floats([-1.05, 0.0, -1.6], [-3.2])))
    assert report["rollout/log_prob_diff_above_0.1"] == pytest.approx(2 / 3)
    report = mismatch(two_rows())
    del report["rollout/log_prob_diff_above_0.1"]  # the first is on the boundary
    share = (0.7408182 + 1.2214028) ** 2 / (2 * (0.7408182**2 + 1.2214028**2))
    expected = {
        "rollout/log_prob_diff_max": 0.4,
        "rollout/log_prob_diff_mean": 0.7 / 3,
        "rollout/kl_k1": 0.1 / 3,
        "rollout/kl_k3": (0.0051709 + 0.0703200 + 0.0214028) / 3,
        "rollout/effective_sample_share": share,
    }
    assert report == pytest.approx(expected, rel=1e-4)


def test_groups_whose_scores_are_equal_have_no_signal() -> None:
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 5.0, 2.0, 2.0, 0.0])
    kept = torch.tensor([True, True, True, True, True, True, True, False])
    sources = ["a", "a", "b", "b", "b", "a", "a", "a"]
    metrics = score_metrics(scores, kept, sources, ["1", "1", "2", "2", "3", "4", "4", "4"])
    assert metrics.pop("groups/same_share") == pytest.approx(2 / 3)  # the single response to 3 is no group
    assert (metrics["critic/score/a/mean"], metrics["critic/score/b/mean"]) == (1.5, 2.0)
    assert "groups/same_share" not in score_metrics(scores, kept, sources, list("12345678"))


def test_metrics_of_several_calls_are_combined_by_kind() -> None:
    first = {"timing_s/gen": 1.0, "rollout/decode_steps": 3, "reward/errors": 1.0, "reward/acc/mean": 0.5}
    second = {"timing_s/gen": 2.0, "rollout/decode_steps": 4, "reward/errors": 2.0, "perf/sync_peak_memory_bytes": 7}
    assert reduce_calls([first | {"perf/sync_peak_memory_bytes": 9}, second | {"reward/acc/mean": 1.0}]) == {
        "timing_s/gen": 3.0, "rollout/decode_steps": 7, "reward/errors": 3.0, "reward/acc/mean": 0.75,
        "perf/sync_peak_memory_bytes": 9,
    }  # fmt: skip


def test_no_mismatch_is_zero_with_every_sample_effective() -> None:
    batch = two_rows()
    report = mismatch(batch.with_columns(rollout_log_probs=batch["old_log_probs"]))
    assert report.pop("rollout/effective_sample_share") == pytest.approx(1.0)
    assert set(report.values()) <= {0.0, -0.0}


def test_a_token_that_the_rollout_held_impossible_leaves_numbers() -> None:
    report = mismatch(two_rows(rollout_log_probs=floats([-200.0, 0.0, -2.0], [-3.0])))
    assert report["rollout/log_prob_diff_max"] == pytest.approx(199)
    assert report["rollout/effective_sample_share"] == pytest.approx(0.5)
    assert all(map(math.isfinite, report.values()))


def test_a_phase_is_timed_and_keeps_worker_metrics() -> None:
    metrics, batch = StepMetrics(RunStatus("unused")), two_rows()
    with metrics.phase("gen"):
        time.sleep(0.02)
        output = DataProto.from_dict({"entropy": floats([1, 2, 3], [4])}, {"metrics": {"rollout/x": 7.0}})
        joined = metrics.union(batch, output)
    assert "entropy" in joined
    assert joined.meta_info == {}
    result = metrics.finished(joined)
    assert result["rollout/x"] == 7.0
    assert 0.02 <= result["timing_s/gen"] <= result["timing_s/step"]
    assert result["perf/total_num_tokens"] == 2 + 4 + 3 + 1
    assert result["perf/throughput"] == pytest.approx(10 / result["timing_s/step"])


def test_per_rank_metrics_are_combined_and_shared_ones_are_not() -> None:
    reports = [
        {
            "rollout/response_tokens": 10.0,
            "rollout/prompt_tokens_cached": 3.0,
            "rollout/slot_use": 0.5,
            "timing_s/sync": 1.0,
            "actor/pg_loss": 0.1,
        },
        {
            "rollout/response_tokens": 30.0,
            "rollout/prompt_tokens_cached": 4.0,
            "rollout/slot_use": 1.0,
            "timing_s/sync": 3.0,
            "actor/pg_loss": 0.1,
        },
    ]
    result = DataProto({}, {"metrics": reports[0], "ranks": [{"metrics": each} for each in reports]})
    assert reduce_ranks(result) == {
        "rollout/response_tokens": 40.0,
        "rollout/prompt_tokens_cached": 7.0,
        "rollout/slot_use": 0.75,
        "timing_s/sync": 3.0,
        "actor/pg_loss": 0.1,
    }
    assert reduce_ranks(DataProto({}, {"metrics": reports[1]})) == reports[1]
    assert reduce_ranks(DataProto()) == {}


class Sleeper(Worker):
    """Sleeps for a number of seconds on each rank."""

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def sleepers() -> Iterator[tuple[Any, Any]]:
    """Yield a role on two ranks and one on a single rank."""
    with pools([PoolSpec("two", ranks_per_node=2), PoolSpec("one")]) as (two, one):
        yield spawn(Sleeper, pool=two), spawn(Sleeper, pool=one)


def test_the_time_of_each_rank_names_the_slowest(sleepers: tuple[Any, Any]) -> None:
    two, one = sleepers
    two.sleep([0.3, 0.0])
    times = RankTimes([two, one, two])
    assert set(times.metrics().values()) == {0.0}
    pending = submit(two.sleep, [0.02, 0.2])
    time.sleep(0.5)  # the driver is late, but the ranks measure their time themselves
    pending.result()
    two.sleep([0.0, 0.1])
    metrics = times.metrics()
    assert metrics.keys() == {"perf/rank_seconds/two/mean", "perf/rank_seconds/two/max", "perf/slowest_rank/two"}
    assert metrics["perf/slowest_rank/two"] == 1
    assert 0.3 <= metrics["perf/rank_seconds/two/max"] < 0.5
    assert metrics["perf/rank_seconds/two/max"] < 2 * metrics["perf/rank_seconds/two/mean"] < 0.9
    two.sleep([0.1, 0.0])
    assert times.metrics()["perf/slowest_rank/two"] == 0  # since the last step, and not of the whole run


def test_the_mismatch_is_that_of_the_tokens_of_an_age() -> None:
    # Differences of the counted tokens: 0.1, -0.4 (both of age 2) and 0.2 (of age 0).
    ages = Ragged.from_rows([[2, 1, 2], [0]])
    metrics = mismatch_by_age(two_rows(), ages)
    assert metrics == pytest.approx(
        {
            "async/age_0_log_prob_diff_mean": 0.2,
            "async/age_0_kl_k3": math.exp(0.2) - 1.2,
            "async/age_2_log_prob_diff_mean": 0.25,
            "async/age_2_kl_k3": (math.exp(0.1) - 1.1 + math.exp(-0.4) - 0.6) / 2,
        },
        rel=1e-5,
    )


def test_the_lengths_of_learned_responses_leave_out_rejected_ones() -> None:
    batch = two_rows()  # of 3 tokens and of 1
    everything = learned_lengths(batch)
    assert everything["async/learned_length/mean"] == everything["async/generated_length/mean"] == 2.0
    rejected = learned_lengths(batch.with_columns(rollout_rs_mask=Ragged.from_rows([[False, True, False], [True]])))
    assert rejected == everything | {f"async/learned_length/{name}": 1.0 for name in ("mean", "max", "p50", "p90")}
    none = learned_lengths(batch.with_columns(rollout_rs_mask=Ragged.from_rows([[False] * 3, [False]])))
    assert not any("learned" in name for name in none)
