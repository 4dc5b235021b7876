"""Runs whose models are named as on the Hugging Face hub: from the cache, and downloaded from a local server."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from support.command_line import finished, start
from support.hub_server import HubServer, write_cache
from support.ppo_runs import ppo_args, run_ppo
from support.reward_models import make_tiny_reward_model
from support.tiny import tiny_tokenizer_folder

NAMES: dict[str, Any] = {
    "actor_rollout_ref.model.path": "team/actor",
    "data.tokenizer": "team/tokenizer",
    "critic.model.path": "team/critic",
    "critic.model.tokenizer_path": "team/tokenizer",
    "reward_model.model.path": "team/rm",
    "reward_model.model.input_tokenizer": "team/tokenizer",
}
SCORED: dict[str, Any] = {"reward_model.enable": True, "reward_model.micro_batch_size_per_gpu": 4}


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    ppo_args(home)  # writes data, actor and critic
    make_tiny_reward_model(home / "rm")
    return home


def folders(home: Path) -> dict[str, Path]:
    models = {f"team/{name}": home / name for name in ("actor", "critic", "rm")}
    return {**models, "team/tokenizer": tiny_tokenizer_folder()}


def test_cached_models_train_like_their_folders(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, folder in folders(home).items():
        write_cache(tmp_path, name, folder)
    (cached,) = run_ppo(home, {**SCORED, **NAMES}, steps=1)
    paths = {key: folders(home)[name] for key, name in NAMES.items()}
    (local,) = run_ppo(home, {**SCORED, **paths}, steps=1)
    assert cached.metrics["critic/score/mean"] == local.metrics["critic/score/mean"] != 0
    assert all(weight.equal(local.actor[name]) for name, weight in cached.actor.items())
    assert all(weight.equal(local.critic[name]) for name, weight in cached.critic.items())


@pytest.mark.slow
def test_missing_models_are_downloaded(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    keys = {**SCORED, **NAMES}
    keys |= {"trainer.total_training_steps": 1, "trainer.save_freq": 1, "trainer.default_local_dir": tmp_path / "run"}
    with HubServer(folders(home)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        run = finished(start("-m", "camshaft", "ppo", *ppo_args(home, keys)))
        assert run.status == 0, run.err
    assert {name for name, file in server.downloads if file == "model.safetensors"} == set(folders(home)) - {
        "team/tokenizer"
    }
    again = {**keys, "trainer.default_local_dir": tmp_path / "again"}
    run = finished(start("-m", "camshaft", "ppo", *ppo_args(home, again)))
    assert run.status == 0, run.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = finished(start("-m", "camshaft", "export", str(tmp_path / "run"), str(tmp_path / "exported")))
    assert run.status == 0, run.err
    assert (tmp_path / "exported" / "tokenizer.json").is_file()
