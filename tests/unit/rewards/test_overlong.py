"""The penalty for long responses, compared with hand-worked numbers."""

import pytest
import torch

from camshaft.dataproto import DataProto, Ragged
from camshaft.rewards.overlong import OverlongPenalty, penalty


def decode(rows: list[list[int]]) -> list[str]:
    return ["".join(map(chr, row)) for row in rows]


def test_penalty_grows_linearly_before_the_limit():
    # Limit 10, buffer 4: no penalty up to 6, a quarter of the factor per further token, the full factor at the limit.
    lengths = torch.tensor([0, 1, 6, 7, 8, 10, 12])
    assert penalty(lengths, limit=10, buffer=4, factor=2.0).tolist() == [0, 0, 0, -0.5, -1, -2, -2]


@pytest.mark.parametrize("log", [True, False])
def test_penalty_applies_to_training_scores_only(manager, log):
    texts = ("ab", "abcd")
    batch = DataProto.from_dict(
        {
            "responses": Ragged.from_rows([[ord(c) for c in text] for text in texts]),
            "response_mask": Ragged.from_rows([[True, True], [True, True, True, False]]),
            "data_source": ["test"] * 2,
            "ground_truth": [""] * 2,
        }
    )
    rewards = OverlongPenalty(manager("return 1.0"), limit=5, buffer=2, factor=1.0, log=log)
    result = rewards.score(batch, decode)
    # 4 of 5 tokens, with a buffer of 2: half of the factor, on the last token of the policy.
    assert [row.tolist() for row in result.token_level_scores.rows()] == [[0, 1.0], [0, 0, 0.5, 0]]
    assert result.scores.tolist() == [1.0, 1.0]
    metrics = {name: value for name, value in result.metrics.items() if "overlong" in name}
    assert metrics == ({"reward/overlong_reward/mean": -0.25, "reward/overlong/mean": 0.5} if log else {})
