"""The training loop in runs of a second; tests/parity checks the numbers of a step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import even_digits
from support.command_line import camshaft
from support.ppo_runs import ppo_args, run_ppo
from transformers import AutoTokenizer

from camshaft import storage
from camshaft.config import PPOConfig
from camshaft.models.loader import load_tokenizer
from camshaft.tracking.base import deterministic
from camshaft.tracking.jsonl import read_metrics


def test_a_run_needs_no_validation_files(tmp_path: Path) -> None:
    assert len(run_ppo(tmp_path, {"data.val_files": "null"}, steps=1)) == 1


def test_validation_before_training_does_not_wait_for_validation_between_steps(tmp_path: Path) -> None:
    logged = run_ppo(tmp_path, {"trainer.val_before_train": True}, steps=1)
    assert [sorted(name for name in step.metrics if name.startswith("val/")) for step in logged] == [
        ["val/reward/mean"],
        [],
    ]


def test_the_last_step_is_always_validated_and_saved(tmp_path: Path) -> None:
    # 16 rows make two steps; the config requests more.
    few = {"data.train_max_samples": 16, "trainer.total_epochs": 1, "trainer.save_freq": 5, "trainer.test_freq": 5}
    logged = run_ppo(tmp_path, few, steps=7)
    assert ["val/reward/mean" in step.metrics for step in logged] == [False, True]
    assert [step for step, _ in storage.step_folders(tmp_path / "run")] == [2]


def test_warm_up_trains_only_the_critic(tmp_path: Path) -> None:
    warm, after = run_ppo(tmp_path, {"trainer.critic_warmup": 1}, steps=2)
    assert "critic/vf_loss" in warm.metrics
    assert "actor/pg_loss" not in warm.metrics
    assert "actor/pg_loss" in after.metrics
    name = "model.norm.weight"
    assert torch.equal(warm.actor[name], torch.ones_like(warm.actor[name]))
    assert not torch.equal(after.actor[name], warm.actor[name])
    assert not torch.equal(after.critic[name], warm.critic[name])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_single_update_computes_its_old_log_probs(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.shuffle": True,
        "actor_rollout_ref.rollout.n": 2,
        "trainer.n_gpus_per_node": ranks,
        **({} if ranks == 1 else {"actor_rollout_ref.actor.strategy": "fsdp"}),
    }
    with monkeypatch.context() as patch:
        patch.setattr(PPOConfig, "old_log_prob_source", lambda self: "actor")
        apart = run_ppo(tmp_path / "apart", once, steps=2)
    together = run_ppo(tmp_path / "together", once, steps=2)
    for one, other in zip(apart, together, strict=True):
        assert "timing_s/old_log_prob" in one.metrics
        assert one.metrics.keys() - other.metrics.keys() == {"timing_s/old_log_prob"}
        numbers = [name for name in other.metrics if not name.startswith(("timing_s", "perf"))]
        assert "actor/entropy" in numbers
        assert other.metrics["rollout/log_prob_diff_mean"] < 1e-5  # rows match their own log-probs
        for name in numbers:
            assert other.metrics[name] == pytest.approx(one.metrics[name], rel=1e-3, abs=1e-5), name


def test_responses_to_a_prompt_are_sampled_independently(tmp_path: Path) -> None:
    (step,) = run_ppo(tmp_path, {"actor_rollout_ref.rollout.n": 4}, steps=1)
    assert len(step.batch) == 8 * 4
    uids = step.batch["uid"].tolist()
    assert uids == [uid for uid in dict.fromkeys(uids) for _ in range(4)]
    texts = [tuple(row.tolist()) for row in step.batch["responses"].rows()]
    assert len(set(texts)) > 28


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_responses_of_every_validation_and_every_step_are_written_down(tmp_path: Path) -> None:
    overrides = {
        "trainer.test_freq": 2,
        "trainer.val_before_train": True,
        "trainer.rollout_data_dir": tmp_path / "said",
    }
    before, first, second = run_ppo(tmp_path, overrides, steps=2)
    validation = tmp_path / "run" / "validation"
    assert sorted(path.name for path in validation.iterdir()) == ["step_0.jsonl", "step_2.jsonl"]
    for step, logged in ((0, before), (2, second)):
        scores = [line["score"] for line in lines(validation / f"step_{step}.jsonl")]
        assert len(scores) == 16
        assert sum(scores) / 16 == pytest.approx(logged.metrics["val/reward/mean"])
    for step, logged in ((1, first), (2, second)):
        rows = lines(tmp_path / "said" / f"step_{step}.jsonl")
        assert [row["ground_truth"] for row in rows] == list(logged.batch["ground_truth"])
        for row in rows:
            score = even_digits.compute_score("", row["response"], row["ground_truth"], {})
            assert row["score"] == pytest.approx(score)


def test_partial_validation_output_is_reported_without_a_shared_folder(tmp_path: Path) -> None:
    none = {"trainer.val_before_train": True, "trainer.validation_data_dir": "null"}
    run_ppo(tmp_path, none, steps=1)
    assert not (tmp_path / "run" / "validation").exists()
    run_ppo(tmp_path, none | {"trainer.log_val_generations": 3}, steps=1)
    assert len(lines(tmp_path / "run" / "validation" / "step_0.jsonl")) == 3


def test_an_export_has_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    ppo_args(tmp_path)  # makes the model
    tokenizer: Any = load_tokenizer(str(tmp_path / "actor"))
    tokenizer.chat_template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "own")
    overrides = {
        "data.tokenizer": tmp_path / "own",
        "trainer.save_freq": 1,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
        "critic.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
    }
    (step,) = run_ppo(tmp_path, overrides, steps=1)
    (prompt, *_), messages = step.batch["prompts"].rows(), [{"role": "user", "content": "1"}]
    assert tokenizer.decode(prompt).startswith("<")  # it was used, too
    for role in ("actor", "critic"):
        exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "global_step_1" / f"{role}_huggingface")
        assert exported.apply_chat_template(messages, tokenize=False) == "<1>"


def test_a_standalone_validation_does_not_change_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = {
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 1,
        "trainer.test_freq": 1,
        "trainer.logger": "jsonl",
    }
    assert camshaft("ppo", *ppo_args(tmp_path, overrides)).status == 0
    (run / "validation" / "step_1.jsonl").rename(tmp_path / "then")
    metrics = (run / "metrics.jsonl").read_bytes()
    alone = {"trainer.val_only": True, "trainer.resume_mode": "resume_path"}
    alone["trainer.resume_from_path"] = run / "global_step_1"
    for _ in range(2):
        run_again = camshaft("ppo", *ppo_args(tmp_path, overrides | alone))
        assert run_again.status == 0, run_again.err
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert [step for step, _ in storage.step_folders(run)] == [1, 2]
    assert (run / "validation" / "step_1.jsonl").read_text() == (tmp_path / "then").read_text()
    (standalone,) = read_metrics(run / "validation" / "metrics.jsonl")
    logged = read_metrics(run / "metrics.jsonl")[0]
    assert standalone["step"] == 1
    assert standalone.pop("timing/at") > logged["timing/at"]
    assert {name: logged[name] for name in standalone} == standalone
    refused = camshaft("ppo", *ppo_args(tmp_path, {"trainer.val_only": True, "data.val_files": "null"}))
    assert refused.status == 2
    assert "validation requires prompts" in refused.err


def test_best_and_worst_response_are_logged_once_per_interval(tmp_path: Path) -> None:
    first, second = run_ppo(tmp_path, {"trainer.sample_interval": 1e6}, steps=2)
    best, worst = first.samples
    assert best["score"] == first.metrics["critic/score/max"]
    assert worst["score"] == first.metrics["critic/score/min"]
    assert best["score"] > worst["score"]
    assert {"prompt", "response"} <= best.keys()
    assert not second.samples
    assert not run_ppo(tmp_path, {"trainer.sample_interval": "null"}, steps=1)[0].samples


def test_validation_changes_nothing_in_training(tmp_path: Path) -> None:
    sampled = {
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
    }
    plain = run_ppo(tmp_path, steps=2)
    validated = run_ppo(tmp_path, sampled | {"trainer.test_freq": 1}, steps=2)
    assert "val/reward/mean" in validated[0].metrics
    for step, other in zip(plain, validated, strict=True):
        metrics = {name: value for name, value in deterministic(other.metrics).items() if not name.startswith("val")}
        assert metrics == deterministic(step.metrics)
        assert all(torch.equal(weights, other.actor[name]) for name, weights in step.actor.items())


def test_a_run_without_a_schedule_saves_and_validates_at_its_end(tmp_path: Path) -> None:
    steps = run_ppo(tmp_path, {"trainer.save_freq": "auto", "trainer.test_freq": "auto"}, steps=2)
    assert "val/reward/mean" in steps[-1].metrics
    assert [folder.name for folder in (tmp_path / "run").glob("global_step_*")] == ["global_step_2"]


def test_a_batch_that_is_not_set_shrinks_to_the_data(tmp_path: Path) -> None:
    words = {"data.train_batch_size": "auto", "actor_rollout_ref.actor.ppo_mini_batch_size": "auto"}
    (step,) = run_ppo(tmp_path, words, steps=1)
    assert len(step.batch) == 64  # all prompts of the file
