"""ReMax: what the samples are compared with is the score of what transformers says is the greedy response."""

from pathlib import Path

import pytest
import torch
from support.ppo_runs import run_ppo
from transformers import AutoModelForCausalLM, AutoTokenizer

from camshaft.dataproto import DataProto
from camshaft.trainer import ppo

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {}\n"
OF_TEXT = "sum(map(ord, solution_str)) % 7 / 2"
"""Something that most texts differ in."""


def greedy_scores(folder: Path, prompts: list[list[int]]) -> list[float]:
    """Of the likeliest tokens by the weights in the folder, each found with a whole forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores: list[float] = []
    for prompt in prompts:
        said: list[int] = []
        with torch.no_grad():
            while len(said) < 8 and (not said or said[-1] != tokenizer.eos_token_id):
                said.append(int(model(torch.tensor([prompt + said])).logits[0, -1].argmax()))
        scores.append(eval(OF_TEXT, {"solution_str": tokenizer.decode(said, skip_special_tokens=True)}))
    return scores


def test_the_baseline_is_the_score_of_the_greedy_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DataProto] = []
    plain = ppo.batch_metrics
    monkeypatch.setattr(ppo, "batch_metrics", lambda batch: (seen.append(batch), plain(batch))[1])
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.format(OF_TEXT))
    remax = {"algorithm.adv_estimator": "remax", "actor_rollout_ref.rollout.n": 2}
    (step,) = run_ppo(tmp_path, {**remax, "custom_reward_function.path": reward}, steps=1)
    (batch,) = seen
    assert len(batch) == 8 * 2
    wanted = greedy_scores(tmp_path / "actor", [row.tolist() for row in batch["prompts"].rows()])
    assert batch["reward_baselines"].tolist() == wanted
    assert len(set(wanted)) > 1, "the case says nothing about whose baseline it is"
    # The score is on the last token, so the reward-to-go is the score everywhere.
    scores, lengths = batch["token_level_scores"].sum(), batch["responses"].lengths
    expected = (scores - batch["reward_baselines"]).repeat_interleave(lengths)
    torch.testing.assert_close(batch["advantages"].values, expected)
    assert step.metrics["baseline/score/mean"] == pytest.approx(sum(wanted) / len(wanted))
    assert step.metrics["baseline/errors"] == 0
    assert step.metrics["timing_s/gen_max"] > 0
    assert not step.critic
