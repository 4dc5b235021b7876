"""ReMax: the baseline is the score of the greedy response according to transformers."""

from pathlib import Path

import pytest
import torch
from support.ppo_runs import run_ppo
from transformers import AutoModelForCausalLM, AutoTokenizer

from camshaft.dataproto import DataProto
from camshaft.errors import RewardError
from camshaft.trainer import ppo

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {}\n"
OF_TEXT = "sum(map(ord, solution_str)) % 7 / 2"
"""A score that differs for most texts."""


def greedy_scores(folder: Path, prompts: list[list[int]]) -> list[float]:
    """Return the scores of the likeliest tokens by the weights in the folder, with a full forward pass for each."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores: list[float] = []
    for prompt in prompts:
        tokens: list[int] = []
        with torch.no_grad():
            while len(tokens) < 8 and (not tokens or tokens[-1] != tokenizer.eos_token_id):
                tokens.append(int(model(torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
        scores.append(eval(OF_TEXT, {"solution_str": tokenizer.decode(tokens, skip_special_tokens=True)}))
    return scores


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[DataProto]:
    """Return the training batches of the steps."""
    recorded: list[DataProto] = []
    original = ppo.batch_metrics
    monkeypatch.setattr(ppo, "batch_metrics", lambda batch: (recorded.append(batch), original(batch))[1])
    return recorded


REMAX = {"algorithm.adv_estimator": "remax", "actor_rollout_ref.rollout.n": 2}


def test_the_baseline_is_the_score_of_the_greedy_response(tmp_path: Path, batches: list[DataProto]) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.format(OF_TEXT))
    (step,) = run_ppo(tmp_path, {**REMAX, "custom_reward_function.path": reward}, steps=1)
    (batch,) = batches
    assert len(batch) == 8 * 2
    reference = greedy_scores(tmp_path / "actor", [row.tolist() for row in batch["prompts"].rows()])
    assert batch["reward_baselines"].tolist() == reference
    assert len(set(reference)) > 1, "all baselines are equal"
    # The score is on the last token, so the reward-to-go is the score at every token.
    scores, lengths = batch["token_level_scores"].sum(), batch["responses"].lengths
    expected = (scores - batch["reward_baselines"]).repeat_interleave(lengths)
    torch.testing.assert_close(batch["advantages"].values, expected)
    assert step.metrics["baseline/score/mean"] == pytest.approx(sum(reference) / len(reference))
    assert step.metrics["baseline/errors"] == 0
    assert step.metrics["timing_s/gen_max"] > 0
    assert not step.critic


FAILING = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    score = {}
    if score == {}:
        raise ValueError("no score")
    return score
"""


def test_prompts_with_failed_greedy_baselines_are_dropped(tmp_path: Path, batches: list[DataProto]) -> None:
    reward = tmp_path / "reward.py"
    overrides = {**REMAX, "custom_reward_function.path": reward, "custom_reward_function.on_error": "drop"}
    reward.write_text(REWARD.format(OF_TEXT))
    (full_step,) = run_ppo(tmp_path, overrides, steps=1)
    baselines = batches[0]["reward_baselines"]
    unlucky = baselines[0]
    assert (baselines != unlucky).any(), "all greedy responses have the same score"

    reward.write_text(FAILING.format(OF_TEXT, float(unlucky)))
    (step,) = run_ppo(tmp_path, overrides, steps=1)
    first, second = batches
    assert second["prompts"].values.equal(first["prompts"].values)
    samples = first["token_level_scores"].sum()
    counts = (baselines != unlucky) & (samples != unlucky)
    assert (second.ragged("response_mask").sum() > 0).tolist() == counts.tolist()
    kept = baselines[::2][baselines[::2] != unlucky]
    assert step.metrics["baseline/errors"] == 8 - len(kept)
    assert step.metrics["baseline/score/mean"] == pytest.approx(float(kept.mean()))
    rows = counts.nonzero().flatten()
    expected, actual = (batch.ragged("advantages").select(rows).values for batch in batches)
    assert actual.equal(expected)
    assert all(weight.isfinite().all() for weight in step.actor.values())
    name = "model.norm.weight"
    assert not step.actor[name].equal(full_step.actor[name])

    reward.write_text("def compute_score(**_):\n    raise ValueError('never')\n")
    with pytest.raises(RewardError, match=r"for all 8 greedy responses of a step.*ValueError: never"):
        run_ppo(tmp_path, overrides, steps=1)
