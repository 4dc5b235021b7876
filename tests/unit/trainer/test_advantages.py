from typing import Any

import pytest
import torch

from camshaft.algorithms import AdaptiveKL, FixedKL
from camshaft.config import AlgorithmConfig
from camshaft.config.schema.algorithm import KLCtrlConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import ConfigError, RewardError
from camshaft.trainer.advantages import (
    build_kl_controller,
    compute_advantages,
    compute_token_rewards,
    group_ids,
    load_estimator,
    reward_parts,
    row_means,
)


def estimated(batch: DataProto, config: AlgorithmConfig) -> DataProto:
    """Run `compute_advantages` with the configured estimator."""
    return compute_advantages(batch, config, load_estimator(config))


def algorithm(**changes: object) -> AlgorithmConfig:
    control = KLCtrlConfig(type="fixed", kl_coef=0.5, horizon=10, target_kl=0.1)
    fields: dict[str, object] = {
        "gamma": 1.0,
        "lam": 1.0,
        "adv_estimator": "gae",
        "norm_adv_by_std_in_grpo": True,
        "kl_penalty": "kl",
        "use_kl_in_reward": True,
        "kl_ctrl": control,
        "filter_groups": {"enable": False, "metric": "seq_reward", "max_num_gen_batches": 0},
        "rollout_correction": {
            "bypass_mode": False,
            "rollout_is": None,
            "rollout_is_threshold": 2.0,
            "rollout_is_batch_normalize": False,
            "rollout_rs": None,
            "rollout_rs_threshold": None,
        },
    }
    return AlgorithmConfig.model_validate(fields | changes)


def floats(*rows: list[float]) -> Ragged:
    return Ragged.from_rows(list(rows), dtype=torch.float32)


def two_rows() -> DataProto:
    """Build a row of three tokens, the second from a tool, and a row of one token."""
    return DataProto.from_dict(
        {
            "token_level_scores": floats([0, 0, 1], [2]),
            "response_mask": Ragged.from_rows([[True, False, True], [True]]),
            "old_log_probs": floats([-1.0, -9.0, -2.0], [-3.0]),
            "ref_log_prob": floats([-1.4, -1.0, -1.8], [-2.0]),
        }
    )


def test_the_kl_penalty_applies_to_every_response_token() -> None:
    # d = 0.4, (tool: none), -0.2 and -1.0; times 0.5.
    rewards, metrics = compute_token_rewards(two_rows(), algorithm(), FixedKL(0.5))
    expected = torch.tensor([-0.2, 0.0, 1.1, 2.5])
    torch.testing.assert_close(rewards.ragged("token_level_rewards").values, expected)
    # Rows: (0.4 - 0.2) / 2 = 0.1 and -1.0; their mean is -0.45.
    assert metrics == pytest.approx({"actor/reward_kl_penalty": -0.45, "actor/reward_kl_penalty_coeff": 0.5})


def test_without_a_penalty_rewards_are_the_scores() -> None:
    rewards, metrics = compute_token_rewards(two_rows(), algorithm(use_kl_in_reward=False), FixedKL(0.5))
    assert torch.equal(rewards.ragged("token_level_rewards").values, torch.tensor([0.0, 0.0, 1.0, 2.0]))
    assert metrics == {}


def test_an_adaptive_weight_moves_after_it_was_used() -> None:
    control = KLCtrlConfig(type="adaptive", kl_coef=0.5, horizon=10, target_kl=0.1)
    kl = build_kl_controller(algorithm(kl_ctrl=control))
    assert isinstance(kl, AdaptiveKL)
    _, metrics = compute_token_rewards(two_rows(), algorithm(kl_ctrl=control), kl)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    # KL / target - 1 = -5.5, clipped to -0.2; two sequences of a horizon of ten.
    assert kl.coef == pytest.approx(0.5 * (1 - 0.2 * 2 / 10))


def test_the_config_chooses_the_controller() -> None:
    assert type(build_kl_controller(algorithm())) is FixedKL
    assert build_kl_controller(algorithm()).coef == 0.5


def test_rows_of_different_lengths_keep_their_tokens() -> None:
    batch = DataProto.from_dict(
        {
            "token_level_rewards": floats([1, 2, 4], [8]),
            "response_mask": Ragged.from_rows([[True, True, True], [True]]),
            "values": floats([0, 0, 0], [0]),
        }
    )
    actual = estimated(batch, algorithm())
    assert actual["returns"].lengths.tolist() == [3, 1]
    assert actual["returns"].values.tolist() == [7, 6, 4, 8]
    # Whitened over the four tokens: mean 6.25, unbiased variance (0.75^2 + 0.25^2 + 2.25^2 + 1.75^2) / 3.
    spread = ((0.75**2 + 0.25**2 + 2.25**2 + 1.75**2) / 3) ** 0.5
    expected = torch.tensor([0.75, -0.25, -2.25, 1.75]) / spread
    torch.testing.assert_close(actual["advantages"].values, expected)


def test_groups_are_the_rows_of_one_prompt_in_any_order() -> None:
    batch = DataProto.from_dict(
        {
            "token_level_rewards": floats([0, 1], [5], [3], [9]),
            "response_mask": Ragged.from_rows([[True, True], [True], [True], [True]]),
            "uid": ["0/7", "0/3", "0/7", "0/3"],
        }
    )
    assert group_ids(batch).tolist() == [0, 1, 0, 1]
    result = estimated(batch, algorithm(adv_estimator="grpo", norm_adv_by_std_in_grpo=False))
    assert result["advantages"].values.tolist() == [-1, -1, -2, 1, 2]


def scored_rows(parts: list[dict[str, float]], failures: list[str | None]) -> DataProto:
    scores = floats(*([0.0, float(row)] for row in range(len(parts))))
    mask = Ragged.from_rows([[True, True]] * len(parts))
    batch = DataProto.from_dict({"token_level_scores": scores, "token_level_rewards": scores, "response_mask": mask})
    return batch.with_columns(uid=["0/1"] * len(parts), score_parts=parts, score_failure=failures)


def test_parts_of_the_reward_come_from_the_results_of_the_function() -> None:
    # The second call failed, so its numbers count as 0; the third row has no "format".
    batch = scored_rows([{"acc": 1.0, "format": 0.5}, {}, {"acc": 0.25}], [None, "timeout", None])
    parts = reward_parts(batch, ["format", "acc", "score"])
    expected = torch.tensor([[0.5, 1.0, 0.0], [0.0, 0.0, 1.0], [torch.nan, 0.25, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(parts, expected, equal_nan=True)


def test_gdpo_weighs_the_parts_of_the_reward() -> None:
    batch = scored_rows([{"acc": 1.0, "format": 0.0}, {"acc": 0.0, "format": 1.0}], [None, None])
    gdpo = algorithm(adv_estimator="gdpo")
    result = compute_advantages(batch, gdpo, load_estimator(gdpo), {"acc": 3.0, "format": 1.0})
    # (3 - 1) / sqrt(2) and its negative, each for two tokens, whitened: +-sqrt(3 / 4)
    values = result["advantages"].values.tolist()
    assert values == pytest.approx([0.75**0.5] * 2 + [-(0.75**0.5)] * 2, rel=1e-5)
    assert result["returns"].values.tolist() == [0, 0, 1, 1]


def test_a_part_that_no_result_contains_is_an_error() -> None:
    batch = scored_rows([{"acc": 1.0}, {"acc": 0.0}], [None, None])
    with pytest.raises(
        RewardError, match=r"gdpo_reward_keys=accuracy: .* no number 'accuracy', only acc; use .*=score"
    ):
        reward_parts(batch, ["accuracy"])


@pytest.mark.parametrize(
    ("result", "returned"),
    [(torch.zeros(2, 3), r"\[\(2, 3\)\]"), ((torch.zeros(2), None), r"\[\(2,\), 'NoneType'\]"), (None, "'NoneType'")],
)
def test_an_estimator_that_breaks_its_contract_is_named(result: Any, returned: str) -> None:
    batch = two_rows()
    batch = batch.with_columns(token_level_rewards=batch["token_level_scores"])
    with pytest.raises(ConfigError, match=rf"adv_estimator=my:one returned .*{returned}.*advantages and returns"):
        compute_advantages(batch, algorithm(adv_estimator="my:one"), lambda *_: result)


def test_a_mean_of_rows_counts_the_tokens_of_the_mask() -> None:
    mask = Ragged.from_rows([[True, False, True], [False]])
    assert row_means(floats([1, 0, 4], [0]), mask).tolist() == [2.5, 0.0]
