"""Overrides of valid configs: one process, existing files."""

from pathlib import Path

import pytest


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Overrides for an RL run."""
    _files(tmp_path)
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"critic.model.path={tmp_path}/model",
        "data.train_batch_size=1024",
        "actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "actor_rollout_ref.actor.strategy=reference",
        "actor_rollout_ref.rollout.name=torch",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
    ]


@pytest.fixture
def words_without_batch(words: list[str]) -> list[str]:
    """Overrides for an RL run, except the batch size."""
    return [word for word in words if not word.startswith("data.train_batch_size")]


@pytest.fixture
def sft_words(tmp_path: Path) -> list[str]:
    """Overrides for a supervised run."""
    _files(tmp_path)
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"model.path={tmp_path}/model",
        "data.train_batch_size=256",
        "strategy=reference",
        "trainer.device=cpu",
    ]


def _files(folder: Path) -> None:
    for name in ("train.parquet", "val.parquet"):
        (folder / name).touch()
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
