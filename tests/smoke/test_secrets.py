"""Secrets of the environment, of the config and of URLs appear nowhere in what a run writes, except in its samples."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.planted_secrets import ENVIRONMENT, MARKS, NUM_SECRETS, leaks, prepare, run

pytestmark = pytest.mark.timeout(280)


def test_a_run_writes_no_secrets(tmp_path: Path) -> None:
    assert NUM_SECRETS >= 40
    arguments = prepare(tmp_path, {"trainer.logger": "[console,jsonl,tensorboard,wandb]"})
    out = run(["ppo", *arguments])
    assert [mark for mark in MARKS if mark in out] == []
    assert "\x1b[31m" not in out
    assert "\\x1b[31m" in out, "the run shows no exception of the function"
    folder = tmp_path / "run"
    assert leaks(folder) == []
    for name in ("log.txt", "config.yaml", "run.json", "rewards/output.log", "rewards/failed.jsonl"):
        assert "***" in (folder / name).read_text(), name
    assert "\x1b" not in (folder / "log.txt").read_text()
    assert "prompt_key: prompt" in (folder / "config.yaml").read_text()
    state = json.loads((folder / "global_step_2" / "trainer" / "state.json").read_text())
    assert state["config"]["custom_reward_function.reward_kwargs"]["api_key"] == "***"
    (samples,) = (folder / "samples").glob("step_*1.parquet")
    assert pq.read_table(samples)["ground_truth"].to_pylist()[0] == ENVIRONMENT["OPENAI_API_KEY"]
