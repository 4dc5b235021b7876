"""A run with data and models on another file system equals the run with local files."""

from pathlib import Path

import fsspec
import pytest
from support.ppo_runs import ppo_args, run_ppo

from camshaft.dataproto import DataProto
from camshaft.tracking import deterministic

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert extra_info["prompt_id"] == data_source, extra_info
    return float(len(solution_str))
"""


def test_a_run_on_urls_is_the_run_on_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "reward.py").write_text(REWARD)
    ppo_args(tmp_path)  # writes models and data
    files = fsspec.filesystem("memory")
    for name in ("actor", "critic", "data"):
        for path in (path for path in (tmp_path / name).rglob("*") if path.is_file()):
            files.pipe_file(f"/bucket/{path.relative_to(tmp_path)}", path.read_bytes())
    more = {"custom_reward_function.path": tmp_path / "reward.py", "data.prompt_id_key": "data_source"}
    elsewhere = {
        "data.train_files": "memory://bucket/data/train.parquet",
        "data.val_files": "memory://bucket/data/held*.parquet",
        "actor_rollout_ref.model.path": "memory://bucket/actor",
        "critic.model.path": "memory://bucket/critic",
    }
    try:
        (remote,) = run_ppo(tmp_path, {**more, **elsewhere}, steps=1)
    finally:
        files.rm("/bucket", recursive=True)
    (local,) = run_ppo(tmp_path, more, steps=1)
    assert deterministic(remote.metrics) == deterministic(local.metrics)
    assert isinstance(remote.batch, DataProto)
    assert remote.batch["prompt_id"].lengths.tolist() == local.batch["prompt_id"].lengths.tolist()
