"""Runs with programs whose sessions have several rows: each sampled token is trained on in its own context."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ppo_runs import ppo_config
from support.reward_models import make_tiny_reward_model
from transformers import AutoModelForSequenceClassification

from camshaft.dataproto import DataProto, Ragged
from camshaft.roles.sequences import SEQUENCES, split_rows
from camshaft.tracking import RunInfo, Tracking
from camshaft.tracking.samples import conversations
from camshaft.trainer.mini_batches import shard_rows, shuffle_seed
from camshaft.trainer.ppo import PPOTrainer
from camshaft.trainer.session import Extensions

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TURNS = f"{ROLLOUT}.multi_turn"
RUN = RunInfo(project="test", experiment="test", folder=Path(), total_steps=1)
SETTINGS: dict[str, Any] = {
    f"{ROLLOUT}.n": 2,
    f"{ACTOR}.ppo_mini_batch_size": 8,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{TURNS}.max_turn_length": 6,
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": False,
    "custom_reward_function.path": "null",
    "data.max_prompt_length": 48,
    "data.max_response_length": 64,
    "trainer.total_training_steps": 1,
    "trainer.total_epochs": 1,
}
PROGRAM = """
import json, os, urllib.request


def ask(messages, n=1):
    '''Send a request, note the sampled tokens, and return the first answer as a message.'''
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = {"model": "policy", "messages": messages, "n": n, "return_token_ids": True}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as reply:
        choices = json.load(reply)["choices"]
    with open("FOLDER/tokens.jsonl", "a") as file:
        file.writelines(json.dumps(choice["token_ids"]) + "\\n" for choice in choices)
    return {"role": "assistant", "content": choices[0]["message"]["content"]}


def solve(base_url, api_key, prompt, ground_truth, row_seed):
    first = ask(prompt)
    turns = [*prompt, first, {"role": "user", "content": "more"}]
    second = ask(turns)
    if int(ground_truth) % 3 == 0:
        ask(turns, n=2)                                                    # two further answers to the same history
        ask([{"role": "user", "content": "short: " + first["content"][:3]}])      # another history
    return float(row_seed % 3)
"""
"""Sessions of one row, and of four rows with five answers."""


def trained(home: Path, folder: Path, **keys: Any) -> tuple[DataProto, Mapping[str, float]]:
    """Run one step with the program in the file of `folder`, and return its batch and its metrics."""
    (folder / "agent.py").write_text(PROGRAM.replace("FOLDER", str(folder)))
    settings = {key.replace("__", "."): value for key, value in keys.items()}
    config = ppo_config(home, {**SETTINGS, f"{TURNS}.agent": f"{folder}/agent.py:solve", **settings})
    steps: list[tuple[DataProto, Mapping[str, float]]] = []
    with PPOTrainer.open(config, Extensions(on_step=(lambda _, *step: steps.append(step),))) as trainer:
        trainer.prepare()
        with Tracking([], RUN) as tracking:
            trainer.fit(tracking)
    return steps[0]


def runs_of(sequences: DataProto) -> Counter[tuple[int, ...]]:
    """Return the answers in sequences: consecutive tokens that were sampled."""
    found: Counter[tuple[int, ...]] = Counter()
    for tokens, mask in zip(
        sequences.ragged("responses").rows(), sequences.ragged("response_mask").rows(), strict=True
    ):
        starts = [i for i in range(len(mask)) if mask[i] and not (i and mask[i - 1])]
        for start in starts:
            length = next((i for i, sampled in enumerate(mask[start:].tolist()) if not sampled), len(mask) - start)
            found[tuple(tokens[start : start + length].tolist())] += 1
    return found


def test_each_sampled_token_is_in_one_row_of_its_context(home: Path, tmp_path: Path) -> None:
    batch, metrics = trained(home, tmp_path)
    forks = torch.tensor([int(truth) % 3 == 0 for truth in batch["ground_truth"]])
    assert 0 < int(forks.sum()) < len(batch) == 16
    assert torch.equal(batch.ragged(SEQUENCES).lengths, 1 + 3 * forks)
    assert torch.equal(batch["turns"], 2 + 3 * forks)
    assert metrics["agent/other_rows"] == 3 * int(forks.sum())
    sampled = Counter(tuple(json.loads(line)) for line in (tmp_path / "tokens.jsonl").read_text().splitlines())
    assert runs_of(split_rows(batch)) == sampled
    assert metrics["rollout/log_prob_diff_max"] < 1e-4  # the trainer's log-probs are those of sampling
    assert all(reason == "done" for reason in batch["stop_reason"])


def test_an_episode_has_one_score_and_one_advantage(home: Path, tmp_path: Path) -> None:
    batch, metrics = trained(home, tmp_path)
    scores = batch.ragged("token_level_scores")
    pairs = scores.sum().view(-1, 2)
    assert len(set(pairs.flatten().tolist())) > 1
    expected = (pairs - pairs.mean(dim=1, keepdim=True)).flatten()
    columns = (batch.ragged("advantages").rows(), batch.ragged("response_mask").rows(), scores.rows())
    for advantage, (advantages, mask, row) in zip(expected, zip(*columns, strict=True), strict=True):
        torch.testing.assert_close(advantages[mask], advantage.expand(int(mask.sum())))
        last = int(mask.nonzero()[-1])
        assert not row[:last].any()
        assert row.sum() == row[last]
    assert metrics["critic/score/mean"] == pytest.approx(float(pairs.mean()))


def test_samples_show_all_rows_of_a_session(home: Path, tmp_path: Path) -> None:
    batch, _ = trained(home, tmp_path)
    texts = [json.loads(text) for text in conversations(batch)]
    for messages, parts, score in zip(texts, batch.ragged(SEQUENCES).rows(), batch["env_scores"].sum(), strict=True):
        rewarded = [message for message in messages if "reward" in message]
        assert len(rewarded) == (2 if len(parts) == 1 else 5)
        assert [message["reward"] for message in rewarded] == [0.0] * (len(rewarded) - 1) + [score]
        assert [message["row"] for message in messages if "row" in message] == list(range(2, len(parts) + 1))


@pytest.mark.slow
def test_two_ranks_train_sessions_as_one_does(home: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, metrics = trained(home, tmp_path / "one")
    ranks: dict[str, Any] = {f"{ACTOR}.strategy": "fsdp", "trainer.n_gpus_per_node": 2}
    two, others = trained(home, tmp_path / "two", **ranks)
    for name in ("responses", SEQUENCES):
        assert torch.equal(one.ragged(name).values, two.ragged(name).values)
    seed = shuffle_seed(ppo_config(home).trainer.seed, step=1)
    rows = shard_rows(len(two), mini_batch=8, epochs=1, seed=seed, dp_size=2).view(2, 2, 4)
    first, second = two.ragged(SEQUENCES).lengths[rows].sum(dim=-1)  # sequences of each rank in the two mini-batches
    assert (first != second).any()
    for name in ("actor/grad_norm", "actor/pg_loss", "agent/other_rows"):
        assert others[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


def test_other_rewards_read_the_last_row(home: Path, tmp_path: Path) -> None:
    model = make_tiny_reward_model(tmp_path / "rm")
    section = "reward_model.overlong_buffer."
    keys: dict[str, Any] = {"reward_model.enable": True, "reward_model.model.path": model, f"{section}enable": True}
    keys["reward_model.model.input_tokenizer"] = "null"
    batch, metrics = trained(home, tmp_path, **keys, **{f"{section}len": 60, f"{section}log": True})
    oracle = AutoModelForSequenceClassification.from_pretrained(model).eval()
    longest: list[int] = []
    joined = Ragged.join(batch.ragged("prompts"), batch.ragged("responses")).rows()
    for ids, parts, score in zip(joined, batch.ragged(SEQUENCES).rows(), batch.ragged("rm_scores").sum(), strict=True):
        last = ids if len(parts) == 1 else ids[-int(parts[-1].sum()) :]
        with torch.no_grad():
            torch.testing.assert_close(oracle(last[None]).logits[0, 0], score, atol=1e-4, rtol=1e-4)
        longest.append(max(behind for _, behind in parts.tolist()))
    assert max(longest) <= 64 < int(batch["responses"].lengths.max())
    expected = [-min(1.0, max(0.0, (length - 4) / 60)) for length in longest]
    assert metrics["reward/overlong_reward/mean"] == pytest.approx(sum(expected) / len(expected))
