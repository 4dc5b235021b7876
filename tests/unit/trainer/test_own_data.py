"""A run on a JSON lines file with its own column names equals the run on the same rows in the format of verl."""

import json
from pathlib import Path
from typing import Any

from support.ppo_runs import ppo_config, run_ppo

from camshaft.data.tables import read_rows

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str) & set(ground_truth)) + extra_info["index"] % 3
"""
NAMED = """
def overlap(response, answer, bonus):
    return len(set(response) & set(answer)) + bonus
"""


def scores(home: Path, overrides: dict[str, Any]) -> list[float]:
    steps = run_ppo(home, {**overrides, "trainer.val_before_train": True, "trainer.test_freq": 1}, steps=2)
    return [value for step in steps for name, value in step.metrics.items() if "score/mean" in name or "val-" in name]


def test_a_run_reads_columns_by_their_usual_names(tmp_path: Path) -> None:
    data = ppo_config(tmp_path).data
    (tmp_path / "verl.py").write_text(VERL)
    (tmp_path / "named.py").write_text(NAMED)
    files = {}
    for key, (path,) in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        files[key] = tmp_path / f"{key}.jsonl"
        with files[key].open("w") as out:
            for row in read_rows(path, ["prompt", "reward_model", "extra_info"]).rows:
                bonus = row["extra_info"]["index"] % 3
                answer = row["reward_model"]["ground_truth"]
                out.write(json.dumps({"messages": row["prompt"], "answer": answer, "bonus": bonus}) + "\n")
    expected = scores(tmp_path, {"custom_reward_function.path": tmp_path / "verl.py"})
    assert scores(tmp_path, {**files, "custom_reward_function.path": tmp_path / "named.py"}) == expected
    assert len(set(expected)) > 2
