"""Resume modes, and the report of a changed config."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import camshaft, sft_args
from support.ppo_runs import ppo_args, ppo_config
from support.shared_folders import shared_folder

from camshaft import storage
from camshaft.checkpoint import CheckpointManager
from camshaft.config import load_sft
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError, CheckpointError
from camshaft.models.tiny import make_tiny_model
from camshaft.tracking import RunInfo, Tracking
from camshaft.tracking.run_folder import RunFolder
from camshaft.trainer.ppo import PPOTrainer
from camshaft.trainer.resume import config_record, list_changes
from camshaft.trainer.supervised import SFTTrainer

BUSY: dict[str, Any] = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 50,
    "algorithm.kl_ctrl.target_kl": 0.02,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "+actor_rollout_ref.model.override_config.attention_dropout": 0.1,
    "+critic.model.override_config.attention_dropout": 0.1,
    "trainer.total_epochs": 1,
    "trainer.test_freq": 1,
    "trainer.save_freq": 2,
    "trainer.best_metric": "val/reward/mean",
    "trainer.resume_mode": "auto",
}


def run(folder: Path, overrides: dict[str, Any], saves_to: Path | None = None, steps: int = 2) -> Path:
    """Start or resume a run up to so many steps; return the folder of the newest step, or of a repeated save."""
    config = ppo_config(folder, {**BUSY, "trainer.total_training_steps": steps, **overrides})
    info = RunInfo("p", "e", folder, steps)
    with PPOTrainer.open(config) as trainer, Tracking([], info) as tracking:
        trainer.prepare()
        if saves_to is None:
            trainer.fit(tracking)
            return trainer.checkpoints.root / f"global_step_{steps}"
        trainer.checkpoints = CheckpointManager(saves_to)
        trainer.save()
        return saves_to / f"global_step_{trainer.global_step}"


@pytest.fixture(scope="module")
def home() -> Path:
    """Return the read-only folder of a run of two steps."""
    return shared_folder("resume", lambda folder: run(folder, {}))


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """Return the newest of two checkpoints, which a test may damage."""
    folder = shared_folder("resume-every-step", lambda folder: run(folder, {"trainer.save_freq": 1}))
    return Path(shutil.copytree(folder / "run", tmp_path / "run")) / "global_step_2"


KINDS = {
    "weights": ["actor/model/model.safetensors", "critic/model/model.safetensors"],
    "moments of the optimizer": ["actor/optimizer/optimizer.safetensors", "critic/optimizer/optimizer.safetensors"],
    "what dropout draws from": ["actor/random/rank_0.safetensors", "critic/random/rank_0.safetensors"],
    "schedule": ["actor/state.json", "critic/state.json"],
    "loader, KL controller, best step": ["trainer/state.json"],
}


def checksums(step: Path) -> dict[str, Any]:
    parts = ("actor", "critic", "trainer")
    return {
        f"{part}/{name}": checksum
        for part in parts
        for name, checksum in storage.read_manifest(step / part)["files"].items()
    }


def test_a_resumed_run_saves_the_same_state(home: Path, tmp_path: Path) -> None:
    before = checksums(home / "run" / "global_step_2")
    torch.manual_seed(99)  # another process than the one that saved
    again = checksums(run(home, {}, saves_to=tmp_path / "again"))
    torch.manual_seed(99)
    fresh = checksums(run(home, {"trainer.default_local_dir": tmp_path / "new"}, saves_to=tmp_path / "fresh"))
    assert sorted(before) == sorted(name for names in KINDS.values() for name in names)
    for kind, names in KINDS.items():
        for name in names:
            assert again[name] == before[name], kind
            assert name not in fresh or fresh[name] != before[name], f"{kind}: two steps did not change it"


def test_the_trainer_state_has_position_best_step_and_config(home: Path) -> None:
    state = json.loads((home / "run" / "global_step_2" / "trainer" / "state.json").read_text())
    assert (state["loader"]["epoch"], state["loader"]["position"]) == (0, 16)
    assert state["kl"]["coef"] != ppo_config(home, BUSY).algorithm.kl_ctrl.kl_coef
    assert state["best"]["step"] in (1, 2)
    assert (home / "run" / "best_checkpointed_iteration.txt").read_text() == str(state["best"]["step"])
    assert state["config"]["trainer.seed"] == 1
    assert not any(key.startswith(("ray_kwargs", "trainer.resume")) for key in state["config"])


def test_a_resumed_supervised_run_saves_the_same_state(tmp_path: Path) -> None:
    args = sft_args(tmp_path, {"trainer.total_training_steps": 2, "trainer.save_freq": 2})
    results = []
    for again in (False, True):
        with SFTTrainer(load_sft(args)) as trainer, Tracking([], RunInfo("p", "e", tmp_path, 2)) as tracking:
            trainer.prepare()
            if again:
                trainer.checkpoints = CheckpointManager(tmp_path / "again")
                trainer.save()
            else:
                trainer.fit(tracking)
            step = trainer.checkpoints.root / "global_step_2"
            results.append([storage.read_manifest(step / part)["files"] for part in ("model", "trainer")])
    assert results[0] == results[1]


# -- a changed config -----------------------------------------------------------------------------


def test_changes_are_shown_as_overrides(tmp_path: Path) -> None:
    before = config_record(ppo_config(tmp_path, BUSY))
    now = ppo_config(
        tmp_path, {**BUSY, "trainer.save_freq": 5, "data.shuffle": False, "trainer.resume_mode": "disable"}
    )
    assert sorted(list_changes(before, now)) == ["data.shuffle=false (was true)", "trainer.save_freq=5 (was 2)"]
    assert list_changes(before, ppo_config(tmp_path, BUSY)) == []


def test_a_change_that_is_allowed_is_logged(home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(home, {"actor_rollout_ref.actor.optim.lr": 5e-4}, saves_to=tmp_path)
    assert "config changes since step 2: actor_rollout_ref.actor.optim.lr=0.0005 (was 0.001)" in (caplog.text)


def test_a_prompt_length_that_was_chosen_is_kept(tmp_path: Path) -> None:
    rows = [{"prompt": "1" * 40, "data_source": "sums", "ground_truth": "1"}]
    long = {"data.val_files": write_parquet(tmp_path / "long.parquet", rows)}
    values = {**BUSY, "data.max_prompt_length": "auto", "trainer.save_freq": 1, "trainer.test_freq": -1}
    values |= {"trainer.best_metric": "null"}
    by_path = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": tmp_path / "run" / "global_step_2"}
    by_path["trainer.default_local_dir"] = tmp_path / "other"
    reasons = []
    for steps, more in enumerate((long, {}, by_path), start=1):
        result = camshaft("ppo", *ppo_args(tmp_path, {**values, **more, "trainer.total_training_steps": steps}))
        assert result.status == 0, result.err
        reasons += re.findall("  prompt_length=40 +(.*)", result.out)
        folder = tmp_path / ("run" if more is not by_path else "other")
        assert RunFolder(folder).config()["actor_rollout_ref.rollout.prompt_length"] == 40
    assert reasons == ["the longest prompt of the data", "as before", "as before"]


def test_a_step_without_a_required_critic_is_rejected(tmp_path: Path) -> None:
    grpo = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2}
    run(tmp_path, {**grpo, "trainer.save_freq": 1}, steps=1)
    with pytest.raises(CheckpointError) as exc_info:
        run(tmp_path, {}, steps=2)
    assert "does not contain critic, which this run needs" in str(exc_info.value)
    assert "algorithm.adv_estimator=gae (was grpo)" in str(exc_info.value)
    assert "trainer.resume_mode=disable" in str(exc_info.value)


def test_other_rows_and_another_model_are_rejected(home: Path, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="with num_rows=64, but this run has num_rows=16: rows were added or removed"):
        run(home, {"data.train_files": home / "data" / "heldout.parquet"}, saves_to=tmp_path)
    with pytest.raises(CheckpointError, match="is a checkpoint of another model"):
        run(home, {"actor_rollout_ref.model.lora_rank": 2}, saves_to=tmp_path)


def test_a_run_without_its_folder_resumes_from_the_remote_copy(tmp_path: Path) -> None:
    second = {"trainer.default_hdfs_dir": f"file://{tmp_path / 'second'}"}
    first = run(tmp_path, second)
    elsewhere = {**second, "trainer.default_local_dir": tmp_path / "elsewhere"}
    again = run(tmp_path, elsewhere, saves_to=tmp_path / "again")
    actual, expected = checksums(again), checksums(first)
    del actual["trainer/state.json"], expected["trainer/state.json"]  # of another folder
    assert actual == expected


def _flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["actor/model/model.safetensors", "critic/state.json", "actor/manifest.json"])
def test_a_flipped_byte_in_the_newest_step_resumes_from_the_step_before(
    file: str, newest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _flip_byte(newest / file)
    manager = CheckpointManager(newest.parent)
    with caplog.at_level("WARNING", "camshaft"):
        saved = manager.latest()
    assert saved is not None
    assert saved.step == 1
    assert caplog.text.count("skipped a checkpoint") == 1
    _flip_byte(newest.parent / "global_step_1" / "actor" / "optimizer" / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"no intact checkpoint; .*damaged ones is 2.*resume_mode=disable"):
        manager.latest()


def test_an_edited_fact_of_a_checkpoint_is_detected(newest: Path) -> None:
    manifest = newest / "trainer" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"global_step": 2', '"global_step": 7'))
    with pytest.raises(CheckpointError, match=r"manifest.json does not match its checksum"):
        CheckpointManager(newest.parent).open(newest)


def test_a_run_does_not_resume_with_other_initial_weights_or_another_reward(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(solution_str, **_):\n    return len(solution_str) % 3\n")
    settings = {"custom_reward_function.path": reward, "trainer.save_freq": 1}
    newest = run(tmp_path, settings, steps=1)
    reward.write_text("def compute_score(solution_str, **_):\n    return len(solution_str) % 2\n")
    with pytest.raises(CheckpointError, match=r"files of custom_reward_function.path differ .*resume_from_path="):
        run(tmp_path, settings)
    explicit = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": newest}
    assert run(tmp_path, settings | explicit).name == "global_step_2"
    make_tiny_model(tmp_path / "other", hidden=32, seed=5)
    with pytest.raises(CheckpointError, match=r"files of actor_rollout_ref.model.path differ from"):
        run(tmp_path, settings | {"actor_rollout_ref.model.path": tmp_path / "other"}, steps=3)
