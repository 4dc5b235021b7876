"""Run folders with metrics and responses, written without training.

make_run(tmp_path / "first", steps=20, changes={"algorithm.adv_estimator": "grpo"})
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from camshaft.tracking.base import RunInfo
from camshaft.tracking.jsonl import JsonlTracker
from camshaft.tracking.record import RunRecord

Curve = Callable[[int], float]

HEALTHY: dict[str, Curve] = {
    "critic/score/mean": lambda step: 1 - 0.9**step,
    "groups/same_share": lambda step: 0.2,
    "response_length/mean": lambda step: 12.0,
    "response_length/clip_ratio": lambda step: 0.05,
    "actor/entropy": lambda step: 2.0 - step / 100,
    "actor/ppo_kl": lambda step: 0.001 * (step % 3),
    "actor/grad_norm": lambda step: 1.0 + 0.1 * (step % 5),
    "actor/skipped_steps": lambda step: 0.0,
    "reward/errors": lambda step: 0.0,
    "reward/timeouts": lambda step: 0.0,
    "rollout/log_prob_diff_mean": lambda step: 1e-6,
    "rollout/effective_sample_share": lambda step: 0.99,
    "timing_s/gen": lambda step: 0.5,
    "timing_s/update_actor": lambda step: 0.3,
    "timing_s/step": lambda step: 0.9,
    "perf/throughput": lambda step: 1000.0 + step,
    "timing/at": lambda step: 1_764_000_000.0 + step,
}
"""Metrics of a run that learns."""


def make_run(
    folder: Path,
    steps: int = 20,
    curves: Mapping[str, Curve] | None = None,
    changes: Mapping[str, Any] | None = None,
    ending: str | None = "finished",
    responses: Mapping[int, list[dict[str, Any]]] | None = None,
) -> Path:
    """Write a run that has logged `steps` steps. `responses` replaces the responses of the last step."""
    config = {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-5}}}, "trainer": {"experiment_name": folder.name}}
    info = RunInfo("sums", folder.name, folder, total_steps=steps, config=config)
    record, metrics = RunRecord(info), JsonlTracker(info)
    for step in range(1, steps + 1):
        metrics.log({name: curve(step) for name, curve in {**HEALTHY, **(curves or {})}.items()}, step)
    metrics.finish()
    if ending:
        record.on_run_end(ending)  # pyright: ignore[reportArgumentType]
    if changes:
        facts = json.loads((folder / "run.json").read_text())
        facts["config"] |= changes
        (folder / "run.json").write_text(json.dumps(facts))
    for step, rows in (responses or {steps: sample_rows()}).items():
        write_samples(folder, step, rows)
    return folder


def write_samples(folder: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """Write the file of a step."""
    (folder / "samples").mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "samples" / f"step_{step}.parquet")


def sample_rows(groups: int = 3, size: int = 4, text: str = "answer {row}") -> list[dict[str, Any]]:
    """Return groups of responses. The first response of each group but the last is right; the first has tokens."""
    rows = []
    for row in range(groups * size):
        group, index = divmod(row, size)
        response = text.replace("{row}", str(row))
        tokens = [end + 1 for end in range(len(response))] if group == 0 else None
        numbers = None if tokens is None else [-0.1 * (position % 7) for position in range(len(tokens))]
        score = 1.0 if index == 0 and group < groups - 1 else 0.0
        rows.append(
            {
                "row": row, "uid": f"0/{group}", "data_source": "sums", "prompt": f"question {group}",
                "response": response, "ground_truth": str(group), "score": score, "reward": score,
                "advantage": score - 1 / size, "gap": 1e-6, "prompt_tokens": 3, "response_tokens": len(response),
                "finished": index != 3, "failure": "error" if row == 2 else None, "token_ends": tokens,
                "old_log_probs": numbers, "rollout_log_probs": numbers, "advantages": numbers,
            }
        )  # fmt: skip
    return rows
