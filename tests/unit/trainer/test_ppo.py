"""What the loop around the step does, on runs of a second; the step itself is compared in tests/parity."""

from pathlib import Path

import torch
from support.ppo_runs import run_ppo

from camshaft import storage


def test_a_run_needs_no_validation_files(tmp_path: Path) -> None:
    assert len(run_ppo(tmp_path, {"data.val_files": "null"}, steps=1)) == 1


def test_validation_before_training_does_not_wait_for_validation_between_steps(tmp_path: Path) -> None:
    logged = run_ppo(tmp_path, {"trainer.val_before_train": True}, steps=1)
    assert [sorted(name for name in step.metrics if name.startswith("val/")) for step in logged] == [
        ["val/reward/mean"],
        [],
    ]


def test_the_last_step_is_validated_and_saved_however_the_run_ends(tmp_path: Path) -> None:
    # 16 rows make two steps; the run is asked for more.
    few = {"data.train_max_samples": 16, "trainer.total_epochs": 1, "trainer.save_freq": 5, "trainer.test_freq": 5}
    logged = run_ppo(tmp_path, few, steps=7)
    assert ["val/reward/mean" in step.metrics for step in logged] == [False, True]
    assert [step for step, _ in storage.step_folders(tmp_path / "run")] == [2]


def test_warm_up_trains_the_critic_alone(tmp_path: Path) -> None:
    warm, after = run_ppo(tmp_path, {"trainer.critic_warmup": 1}, steps=2)
    assert "critic/vf_loss" in warm.metrics
    assert "actor/pg_loss" not in warm.metrics
    assert "actor/pg_loss" in after.metrics
    name = "model.norm.weight"
    assert torch.equal(warm.actor[name], torch.ones_like(warm.actor[name]))
    assert not torch.equal(after.actor[name], warm.actor[name])
    assert not torch.equal(after.critic[name], warm.critic[name])


def test_each_response_to_a_prompt_is_drawn_by_itself(tmp_path: Path) -> None:
    (step,) = run_ppo(tmp_path, {"actor_rollout_ref.rollout.n": 4}, steps=1)
    assert len(step.batch) == 8 * 4
    uids = step.batch["uid"].tolist()
    assert uids == [uid for uid in dict.fromkeys(uids) for _ in range(4)]
    texts = [tuple(row.tolist()) for row in step.batch["responses"].rows()]
    assert len(set(texts)) > 28
