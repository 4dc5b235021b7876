"""A rank's responses are scored while other ranks still generate; the scores do not change."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.late_rank import late_rank
from support.ppo_runs import Step, run_ppo
from support.same_run import RANKS

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("fork_server")]

GRPO: dict[str, Any] = {
    # Validation has five rows, so the second rank has one padding row that is dropped.
    "trainer.val_before_train": True,
    "data.val_max_samples": 5,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 2,
}
REMAX: dict[str, Any] = {"algorithm.adv_estimator": "remax"}


def untimed(step: Step) -> dict[str, float]:
    return {name: value for name, value in step.metrics.items() if not name.startswith(("timing_s/", "perf/"))}


def failed(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "rewards" / "failed.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "time")} for line in lines]


@pytest.mark.parametrize(
    ("late", "changes"),
    [
        pytest.param(1, GRPO, id="the second rank is late", marks=pytest.mark.slow),
        pytest.param(0, REMAX, id="the first rank is late", marks=pytest.mark.slow),
    ],
)
def test_scoring_begins_while_another_rank_generates(late: int, changes: dict[str, Any], tmp_path: Path) -> None:
    with late_rank(tmp_path, late) as overrides:
        overrides |= {**RANKS, **changes}
        actual = run_ppo(tmp_path, {**overrides, "trainer.default_local_dir": tmp_path / "late"}, steps=1)
        overrides["actor_rollout_ref.rollout.name"] = "torch"
        expected = run_ppo(tmp_path, {**overrides, "trainer.default_local_dir": tmp_path / "plain"}, steps=1)
    assert [untimed(step) for step in actual] == [untimed(step) for step in expected]
    assert failed(tmp_path / "late") == failed(tmp_path / "plain")
    assert actual[-1].metrics["reward/errors"] > 0, "the test needs a row that fails"
