"""Interrupted runs resume with bit-identical logs and files."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import camshaft, sft_args
from support.interrupting import NAME, run_until
from support.ppo_runs import ppo_args
from transformers import AutoModelForCausalLM, AutoTokenizer

from camshaft import storage
from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics

pytestmark = pytest.mark.timeout(150)

# An epoch has three steps, so a run of six steps crosses an epoch boundary.
LENGTH = {"trainer.total_training_steps": 6, "trainer.total_epochs": 2, "trainer.save_freq": 2}
PPO: dict[str, Any] = {
    **LENGTH,
    "data.train_max_samples": 24,
    "trainer.test_freq": 3,
    "trainer.val_before_train": True,
    "trainer.logger": f"[jsonl,{NAME}]",
    "trainer.resume_mode": "auto",
}
BUSY: dict[str, Any] = {
    **PPO,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 50,
    "algorithm.kl_ctrl.target_kl": 0.02,
    "actor_rollout_ref.actor.shuffle": True,
    "actor_rollout_ref.actor.ppo_epochs": 2,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "actor_rollout_ref.rollout.n": 2,
    "+actor_rollout_ref.model.override_config.attention_dropout": 0.1,
    "critic.optim.lr_warmup_steps": 5,
}
GRPO: dict[str, Any] = {
    **PPO,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.actor.use_kl_loss": True,
    "data.shuffle": True,
}
SFT: dict[str, Any] = {
    **LENGTH,
    "data.train_max_samples": 24,
    "trainer.logger": f"[jsonl,{NAME}]",
    "+model.override_config.attention_dropout": 0.1,
}


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    ppo_args(home)
    return home


Command = Callable[..., list[str]]


@pytest.fixture
def command(home: Path) -> Command:
    """Return the command-line arguments of a run in a folder."""

    def words(settings: Mapping[str, Any], run: Path, **more: Any) -> list[str]:
        make, name = (sft_args, "sft") if settings is SFT else (ppo_args, "ppo")
        changes = {f"trainer.{key}": value for key, value in more.items()}
        return [name, *make(home, {**settings, "trainer.default_local_dir": run, **changes})]

    return words


@pytest.fixture(scope="module")
def uninterrupted(home: Path) -> Path:
    """Return the read-only folder of an uninterrupted run of `PPO`."""
    assert camshaft("ppo", *ppo_args(home, {**PPO, "trainer.default_local_dir": home / "whole"})).status == 0
    return home / "whole"


def lines(run: Path) -> list[str]:
    """Return the logged metrics as text with full precision, without timings."""
    return [json.dumps(deterministic(line)) for line in read_metrics(run / "metrics.jsonl")]


def weights(run: Path, step: int) -> dict[str, Any]:
    """Return the checksums of all files that the roles wrote at a step."""
    roles = [path for path in (run / f"global_step_{step}").iterdir() if path.name != "trainer"]
    return {role.name: storage.read_manifest(role)["files"] for role in roles}


def steps(run: Path) -> list[int]:
    return [step for step, _ in storage.step_folders(run)]


@pytest.mark.parametrize(
    ("settings", "killed_after", "goes_on_after"),
    [
        pytest.param(PPO, 3, 2, id="ppo"),
        pytest.param(BUSY, 4, 2, id="adaptive KL, shuffled", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_resumes_bitwise(
    settings: dict[str, Any],
    killed_after: int,
    goes_on_after: int,
    command: Command,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference, killed = uninterrupted, tmp_path / "killed"
    if settings is not PPO:
        reference = tmp_path / "whole"
        assert camshaft(*command(settings, reference)).status == 0
    result = run_until(killed_after, killed, command(settings, killed), monkeypatch, fork=settings is PPO)
    assert result.status == -signal.SIGKILL
    assert steps(killed) == [goes_on_after]
    assert camshaft(*command(settings, killed)).status == 0
    assert [line["step"] for line in read_metrics(killed / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 6]
    assert lines(killed) == lines(reference)
    assert weights(killed, 6) == weights(reference, 6)


@pytest.mark.slow
def test_a_killed_supervised_run_resumes_bitwise(
    command: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_until(4, killed, command(SFT, killed), monkeypatch).status == -signal.SIGKILL
    assert steps(killed) == [2]
    assert camshaft(*command(SFT, killed)).status == 0
    assert camshaft(*command(SFT, uninterrupted)).status == 0
    assert len(lines(killed)) == 6
    assert lines(killed) == lines(uninterrupted)
    assert weights(killed, 6) == weights(uninterrupted, 6)

    exported: Any = AutoModelForCausalLM.from_pretrained(killed / "huggingface")
    trained = load_file(killed / "global_step_6" / "model" / "model" / "model.safetensors")
    initial = load_file(home / "actor" / "model.safetensors")
    parameters = dict(exported.named_parameters())
    assert parameters.keys() == trained.keys() == initial.keys()
    assert all(torch.equal(parameters[name], trained[name]) for name in parameters)
    assert not any(torch.equal(parameters[name], initial[name]) for name in parameters)
    assert AutoTokenizer.from_pretrained(killed / "huggingface")("1+1=")["input_ids"]


@pytest.mark.slow
def test_an_interrupted_run_reports_it_and_resumes_bitwise(
    command: Command, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    result = run_until(5, run, command(PPO, run), monkeypatch, signal.SIGINT)
    assert (result.status, result.err) == (130, "interrupted\n")
    assert camshaft(*command(PPO, run)).status == 0
    assert lines(run) == lines(uninterrupted)


@pytest.mark.slow
def test_a_failed_run_resumes_bitwise(command: Command, tmp_path: Path) -> None:
    reference, failed = tmp_path / "whole", tmp_path / "ended"
    failed.mkdir()
    (failed / "stop").write_text("5")
    with pytest.raises(SystemExit, match="the test ends this run"):
        camshaft(*command(GRPO, failed))
    (failed / "stop").unlink()
    assert camshaft(*command(GRPO, failed)).status == 0
    assert camshaft(*command(GRPO, reference)).status == 0
    assert lines(failed) == lines(reference)
    assert weights(failed, 6) == weights(reference, 6)


@pytest.mark.slow
def test_resuming_with_smaller_batches_saves_the_last_step(command: Command, tmp_path: Path) -> None:
    # 16 of the first 24 rows are done; batches of 4 give 2 more steps of the first epoch and 6 of the second.
    assert camshaft(*command(PPO, tmp_path, total_training_steps=2)).status == 0
    args = command(PPO, tmp_path, total_training_steps="null", save_freq=7)
    assert camshaft(*args, "data.train_batch_size=4").status == 0
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(11))
    assert steps(tmp_path) == [2, 7, 10]


@pytest.mark.slow
def test_a_run_that_is_made_longer_is_the_longer_run(command: Command, uninterrupted: Path, tmp_path: Path) -> None:
    assert camshaft(*command(PPO, tmp_path, total_training_steps=4)).status == 0
    assert camshaft(*command(PPO, tmp_path)).status == 0
    # Step 4 was the last step of the first run, so it was validated.
    actual, expected = read_metrics(tmp_path / "metrics.jsonl"), read_metrics(uninterrupted / "metrics.jsonl")
    extra = {name for name in actual[4] if name.startswith("val")}
    assert extra == {name for name in actual[3] if name.startswith("val")}
    actual[4] = {name: value for name, value in actual[4].items() if name not in extra}
    assert [deterministic(line) for line in actual] == [deterministic(line) for line in expected]
    assert weights(tmp_path, 6) == weights(uninterrupted, 6)


def test_restarting_a_finished_run_changes_nothing(command: Command, uninterrupted: Path, tmp_path: Path) -> None:
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    assert camshaft(*command(PPO, run)).status == 0
    assert (run / "metrics.jsonl").read_text() == (uninterrupted / "metrics.jsonl").read_text()
    assert weights(run, 6) == weights(uninterrupted, 6)


# -- the checkpoint that a run resumes from -------------------------------------------------------


@pytest.mark.slow
def test_resume_mode_disable_keeps_earlier_steps_aside(command: Command, uninterrupted: Path, tmp_path: Path) -> None:
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    args = command(PPO, run, resume_mode="disable", total_training_steps=2, max_actor_ckpt_to_keep=1)
    assert camshaft(*args).status == 0
    assert steps(run) == [2]
    assert steps(run / "aside.1") == [2, 4, 6]
    assert lines(run)[:2] == lines(uninterrupted)[:2]
    assert len(lines(run)) == 3
    assert (run / "metrics.1.jsonl").read_text() == (uninterrupted / "metrics.jsonl").read_text()
    # The next run resumes the new run at step 2, not the older one at step 6.
    assert "resumed from" in (result := camshaft(*command(PPO, run))).out
    assert "global_step_2" in "".join(result.out.split())
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5, 6]


def test_resume_path_starts_from_that_step(command: Command, uninterrupted: Path, tmp_path: Path) -> None:
    chosen = uninterrupted / "global_step_2"
    elsewhere = command(PPO, tmp_path / "run", resume_mode="resume_path", resume_from_path=chosen)
    assert camshaft(*elsewhere).status == 0
    assert lines(tmp_path / "run") == lines(uninterrupted)[3:]
    assert weights(tmp_path / "run", 6) == weights(uninterrupted, 6)


@pytest.mark.slow
def test_resuming_an_earlier_step_moves_later_steps_aside(
    command: Command, uninterrupted: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    args = command(PPO, run, resume_mode="resume_path", resume_from_path=run / "global_step_2", save_freq=3)
    assert camshaft(*args).status == 0
    assert steps(run) == [2, 3, 6]
    assert steps(run / "aside.1") == [4, 6]
    assert lines(run) == lines(uninterrupted)


@pytest.mark.slow
def test_resume_path_uses_the_remote_copy(command: Command, uninterrupted: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    assert camshaft(*command(PPO, tmp_path / "a", default_hdfs_dir=second, total_training_steps=2)).status == 0
    shutil.rmtree(tmp_path / "a")
    args = command(PPO, tmp_path / "b", resume_mode="resume_path", resume_from_path=second / "global_step_2")
    assert camshaft(*args).status == 0
    assert lines(tmp_path / "b") == lines(uninterrupted)[3:]


def test_resume_path_of_a_folder_with_several_steps_names_one(
    command: Command, uninterrupted: Path, tmp_path: Path
) -> None:
    run = camshaft(*command(PPO, tmp_path, resume_mode="resume_path", resume_from_path=uninterrupted))
    assert run.status == 1
    assert "contains several checkpoints" in run.err
    assert "global_step_6" in run.err


# -- incomplete steps -----------------------------------------------------------------------------


def without_trainer(step: Path) -> None:
    shutil.rmtree(step / "trainer")


def without_critic(step: Path) -> None:
    shutil.rmtree(step / "critic")


def in_mid_write(step: Path) -> None:
    without_trainer(step)
    without_critic(step)
    (step / "actor" / "manifest.json").write_bytes(storage._UNFINISHED_MANIFEST)
    (step / "actor").rename(step / "actor.unfinished")


def file_cut_off(step: Path) -> None:
    os.truncate(step / "actor" / "optimizer" / "optimizer.safetensors", 1000)


def manifest_cut_off(step: Path) -> None:
    os.truncate(step / "trainer" / "manifest.json", 10)


@pytest.mark.parametrize(
    "spoil",
    [
        in_mid_write,
        *(
            pytest.param(spoil, marks=pytest.mark.slow)
            for spoil in (without_trainer, file_cut_off, without_critic, manifest_cut_off)
        ),
    ],
)
def test_an_incomplete_newest_step_is_skipped(
    spoil: Callable[[Path], None], command: Command, uninterrupted: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    spoil(run / "global_step_6")
    resumed = camshaft(*command(PPO, run))
    assert resumed.status == 0
    output = "".join(resumed.out.split())
    assert "skippedacheckpoint:" in output
    assert "resumedfrom" in output
    assert "global_step_4" in output.split("resumedfrom")[1]
    assert lines(run) == lines(uninterrupted)
    assert weights(run, 6) == weights(uninterrupted, 6)


def test_a_changed_byte_resumes_from_the_step_before(command: Command, uninterrupted: Path, tmp_path: Path) -> None:
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    file = run / "global_step_6" / "critic" / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    table = camshaft("checkpoints", "--verify", str(run)).out
    assert "broken" in table.splitlines()[-1]
    assert "'model/model.safetensors' does not match its checksum" in table
    result = camshaft(*command(PPO, run))
    assert result.status == 0
    assert "'model/model.safetensors'doesnotmatchitschecksum" in "".join(result.out.split())
    assert lines(run) == lines(uninterrupted)
    assert weights(run, 6) == weights(uninterrupted, 6)


def test_retention_keeps_the_configured_number_of_checkpoints(command: Command, tmp_path: Path) -> None:
    args = command(PPO, tmp_path, save_freq=1, max_actor_ckpt_to_keep=2, max_critic_ckpt_to_keep=1)
    assert camshaft(*args).status == 0
    assert steps(tmp_path) == [5, 6]
    assert sorted(path.name for path in (tmp_path / "global_step_5").iterdir()) == ["actor", "trainer"]
    assert sorted(path.name for path in (tmp_path / "global_step_6").iterdir()) == ["actor", "critic", "trainer"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"
