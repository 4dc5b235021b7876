"""The combined scores of a function and a model, compared with sums by hand."""

from typing import Any

import pytest
import torch

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError, RewardError
from camshaft.rewards.combined import CombinedRewards


def decode(rows: list[list[int]]) -> list[str]:
    return ["".join(map(chr, row)) for row in rows]


def batch_of(*scores: list[float], **columns: Any) -> DataProto:
    """Return responses `a` and `bcd` with these scores of their tokens."""
    rows = {
        "responses": Ragged.from_rows([[ord(c) for c in text] for text in ("a", "bcd")]),
        "data_source": ["test"] * 2,
        "ground_truth": [""] * 2,
        "rm_scores": Ragged.from_rows(list(scores), torch.float32),
    }
    return DataProto.from_dict(rows | columns)


def test_scores_are_summed_with_weight_and_logged_separately(manager):
    rewards = CombinedRewards(manager("return len(solution_str)"), weight=0.5)
    result = rewards.score(batch_of([2.0], [0, 0, -4.0], rm_truncated=torch.tensor([False, True])), decode)
    # 1 + 0.5 x 2 and 3 - 0.5 x 4, each on the last token.
    assert result.scores.tolist() == [2.0, 1.0]
    assert [row.tolist() for row in result.token_level_scores.rows()] == [[2.0], [0, 0, 1.0]]
    assert result.metrics.pop("timing_s/reward_call_max") > 0
    assert result.metrics.pop("perf/reward_processes") == 0
    assert result.metrics == {
        "reward/errors": 0, "reward/invalid": 0, "reward/timeouts": 0, "reward/crashes": 0, "reward/slow": 0,
        "reward/function/mean": 2.0, "reward/model/mean": -1.0, "reward/model/truncated": 1.0,
    }  # fmt: skip
    assert result.parts == ({"function": 1.0, "model": 2.0}, {"function": 3.0, "model": -4.0})


def test_a_function_that_fails_leaves_the_models_score(manager):
    rewards = CombinedRewards(manager("if solution_str == 'a': raise ValueError\nreturn {'score': 1.0, 'acc': 1.0}"))
    result = rewards.score(batch_of([2.0], [0, 0, 3.0]), decode)
    assert result.scores.tolist() == [2.0, 4.0]
    assert (result.num_failed, result.metrics["reward/acc/mean"]) == (1, 1.0)
    assert "reward/model/truncated" not in result.metrics


def test_rows_dropped_by_the_function_stay_dropped(manager):
    rewards = CombinedRewards(manager("if solution_str == 'a': raise ValueError\nreturn 1.0", on_error="drop"))
    assert rewards.score(batch_of([2.0], [0, 0, 3.0]), decode).dropped == (0,)


def test_a_model_scores_without_a_function():
    batch = batch_of([2.0], [1.0, 0, 3.0]).drop("data_source", "ground_truth")
    result = CombinedRewards(None, weight=2.0).score(batch, decode)
    assert result.scores.tolist() == [2.0, 4.0]  # the weight applies only to a sum; a custom worker may score any token
    assert [row.tolist() for row in result.token_level_scores.rows()] == [[2.0], [1.0, 0, 3.0]]
    assert result.num_failed == 0
    assert result.metrics["reward/model/mean"] == 3.0
    assert "reward/function/mean" not in result.metrics


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_an_error(wrong):
    with pytest.raises(RewardError, match=rf"for row 1 is {wrong} \(1 of 2 scores.*model_dtype=float32"):
        CombinedRewards(None).score(batch_of([2.0], [0, 0, wrong]), decode)


def test_a_result_entry_named_model_is_an_error(manager):
    with pytest.raises(RewardError, match=r"contains 'model'.*rename it"):
        CombinedRewards(manager("return {'score': 1, 'model': 2}")).score(batch_of([2.0], [0, 0, 3.0]), decode)


def test_missing_model_scores_are_an_error_that_names_the_writer():
    with pytest.raises(BatchError, match=r"rm_scores.*roles/reward_model\.compute_rm_score"):
        CombinedRewards(None).score(batch_of([2.0], [0, 0, 3.0]).drop("rm_scores"), decode)
