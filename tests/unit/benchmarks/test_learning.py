"""`benchmarks/learning.py`: its statistics, its page, its problems, and resuming after an interruption."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from camshaft.config import load_ppo, load_sft
from camshaft.data.tables import read_rows
from camshaft.models.tiny import make_tiny_model

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def learning() -> Iterator[Any]:
    """Import the script as Python does when it is started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("learning")
        for name in ("learning", "learning_page", "machine"):
            del sys.modules[name]


@pytest.fixture
def few(learning: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script with few problems."""
    small = {name: replace(task, num_train=200, start=0.5, goal=0.75) for name, task in learning.TASKS.items()}
    monkeypatch.setattr(learning, "TASKS", small)
    monkeypatch.setattr(learning, "NUM_HELDOUT", 40)
    return learning


def curve_of(learning: Any, seed: int, correct: list[float], algorithm: str = "grpo", task: str = "gcd") -> Any:
    steps = [20 * i for i in range(len(correct))]
    return learning.Run(task, algorithm, seed, steps, correct, correct, [0.5], 60.0 + seed, 30.0 + seed)


def test_a_goal_counts_only_from_at_most_the_stated_start(few: Any) -> None:
    def reached(*correct: float) -> bool:
        return few.reached(few.TASKS["gcd"], curve_of(few, 0, list(correct)))

    assert reached(0.5, 0.2, 0.75)
    assert not reached(0.5, 0.9, 0.74)
    assert not reached(0.51, 0.9)


def test_the_table_has_mean_extremes_and_goal_counts(few: Any) -> None:
    runs = [curve_of(few, 2, [0.4, 0.8]), curve_of(few, 0, [0.4, 0.9]), curve_of(few, 1, [0.4, 0.6])]
    runs.append(curve_of(few, 0, [0.25, 1.0], "gae"))
    _, _, *rows = few.result_table(few.TASKS, runs).splitlines()
    assert rows == [
        "| `gcd` | PPO | 0.25 | at most 0.5 | **1.00** | at least 0.75 | 1 of 1 | 0.25 | 1.00 | 60 | 30 |",
        "| `gcd` | GRPO | 0.40 | at most 0.5 | **0.77 (0.60-0.90)** | at least 0.75 | 2 of 3 "
        "| 0.40 | 0.77 (0.60-0.90) | 61 | 31 |",
    ]


def test_the_page_names_every_run_that_missed_its_goal(few: Any) -> None:
    good, bad = curve_of(few, 0, [0.4, 0.8]), curve_of(few, 3, [0.4, 0.61], "gae", "arithmetic")
    assert few.verdict(few.TASKS, [good]) == "**All 1 runs reached their goal.**"
    assert few.verdict(few.TASKS, [good, bad]).splitlines() == [
        "**1 of 2 runs reached their goal.** These did not:",
        "",
        "- PPO on `arithmetic`, seed 3: from 0.400 to 0.610; stated were at most 0.5 and at least 0.75",
    ]


def test_page_and_json_are_written_from_the_runs(few: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "RESULTS", tmp_path / "learning.json")
    few.write(tmp_path / "page.md", [curve_of(few, 0, [0.4, 0.55, 0.8]), curve_of(few, 1, [0.4, 0.5, 0.6])], tmp_path)
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "**1 of 2 runs reached their goal.**" in text
    assert "| `gcd` | GRPO | 0 | 0.40 0.55 0.80 |" in text
    assert "algorithm.adv_estimator=grpo" in text
    assert "adv_estimator=gae" not in text, "PPO did not run"
    assert "| `spell_backward`" not in text, "this task did not run"
    kept = json.loads((tmp_path / "learning.json").read_text(encoding="utf-8"))
    assert [(run["seed"], run["reached"]) for run in kept["runs"]] == [(0, True), (1, False)]
    assert [command.split()[:2] for command in kept["commands"]] == [["camshaft", "sft"], ["camshaft", "ppo"]]
    assert kept["stated"]["gcd"] == {"start": 0.5, "goal": 0.75}


def stale_runs(learning: Any) -> list[Any]:
    """Return runs whose synchronous mean is 0.6, with a standard deviation of 0.05, and whose stale ones are lower."""
    ends = {0: (0.55, 0.6, 0.65), 1: (0.5, 0.5, 0.5), 4: (0.5, 0.4, 0.54)}
    return [
        replace(curve_of(learning, seed, [0.4, end]), max_staleness=bound)
        for bound, values in ends.items()
        for seed, end in enumerate(values)
    ]


def test_a_stale_mean_misses_by_what_it_lacks_to_two_deviations(few: Any) -> None:
    _, _, row = few.staleness_table(few.TASKS, stale_runs(few)).splitlines()
    synchronous, one, four = "0.600 (0.550-0.650)", "0.500 (0.500-0.500)", "0.480 (0.400-0.540), **0.020 below**"
    assert row == f"| `gcd` | GRPO | 0.400 | {synchronous} | 0.500 | {one} | {four} |"
    equal = [replace(run, correct=[0.4, 0.6 - 0.03 * (run.max_staleness > 0)]) for run in stale_runs(few)]
    assert few.staleness_table(few.TASKS, equal).endswith(
        "| 0.580 | 0.570 (0.570-0.570), **0.010 below** | 0.570 (0.570-0.570), **0.010 below** |"
    )


def test_stale_runs_leave_the_rest_of_the_page(few: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "RESULTS", tmp_path / "learning.json")
    file = tmp_path / "page.md"
    few.write(file, [curve_of(few, 0, [0.4, 0.8])], tmp_path)
    before = file.read_text()
    few.write_staleness(file, stale_runs(few), tmp_path)
    text = file.read_text()
    start, end = text.index("## Staleness"), text.index("## Episodes")
    assert text[:start] + text[end:] == before
    assert "`algorithm.rollout_correction.bypass_mode=True`" in text
    assert "--task gcd --staleness 0,1,4 --seeds 3" in text
    assert "1 of 2 means meet this. The runs of `arithmetic`, `spell_backward` were not repeated." in text
    commands = json.loads((tmp_path / few.STALENESS).read_text())["commands"]
    assert [f"max_staleness={bound}" in command for bound, command in zip((1, 4), commands[1:], strict=True)] == [
        True
    ] * 2
    few.write(file, [curve_of(few, 0, [0.4, 0.8])], tmp_path)
    assert file.read_text() == text


def test_the_spelling_mistake_changes_only_the_ends(learning: Any) -> None:
    assert [learning.ends_swapped(word[::-1]) for word in ("gunl", "sun", "at", "a")] == ["lung", "nus", "ta", "a"]


@pytest.mark.parametrize("name", ["gcd", "spell_backward"])
def test_held_out_problems_are_not_trained_and_sixty_percent_err(name: str, few: Any, tmp_path: Path) -> None:
    few.write_problems(name, tmp_path)
    columns = ["prompt", "reward_model"]
    train, heldout = (read_rows(tmp_path / f"{split}.parquet", columns).rows for split in ("train", "heldout"))
    questions = {few.question(row) for row in heldout}
    assert len(heldout) == 40
    assert questions.isdisjoint(few.question(row) for row in train)
    answers = [row["response"] for row in read_rows(tmp_path / "warm_up.parquet", ["prompt", "response"]).rows]
    right = [row["reward_model"]["ground_truth"] for row in train]
    other = [few.TASKS[name].mistake(answer) for answer in right]
    assert all(answer in pair for answer, *pair in zip(answers, right, other, strict=True))
    distinct = [(answer, wrong) for answer, ok, wrong in zip(answers, right, other, strict=True) if ok != wrong]
    assert 0.45 < sum(answer == wrong for answer, wrong in distinct) / len(distinct) < 0.75


def test_two_numbers_in_another_order_are_the_same_question(learning: Any) -> None:
    one, mirrored, other = (
        {"prompt": [{"role": "user", "content": f"Find the GCD of {a}, {b}."}]}
        for a, b in ((12, 18), (18, 12), (12, 8))
    )
    assert learning.question(one) == learning.question(mirrored) != learning.question(other)


def test_every_command_has_a_config_that_passes_all_checks(learning: Any, tmp_path: Path) -> None:
    for name, task in learning.TASKS.items():
        for folder in ("model", "warm_up/huggingface"):
            make_tiny_model(tmp_path / name / folder)
        (tmp_path / name / "data").mkdir()
        for file in learning.FILES:
            (tmp_path / name / "data" / file).touch()
        assert load_sft(learning.warm_up_command(name, tmp_path)[1:]).trainer.total_training_steps == task.warm_up
        for algorithm in learning.ALGORITHMS:
            for bound in (0, 4):
                config = load_ppo(learning.training_command(name, algorithm, 3, tmp_path, bound)[1:])
                assert (config.algorithm.adv_estimator, config.trainer.seed) == (algorithm, 3)
                assert config.async_training.max_staleness == bound


def test_finished_runs_are_not_repeated_by_default(few: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def camshaft(args: list[str], log: Path) -> tuple[float, float]:
        ran.append(args[0])
        log.with_suffix("").mkdir(exist_ok=True)
        if args[0] == "ppo":
            lines = [
                {"step": 0, "val-aux/camshaft/arithmetic/correct/mean@1": 0.25, "val/reward/mean": 0.3},
                {"step": 1, "critic/score/mean": 0.4},
                {
                    "step": 2,
                    "critic/score/mean": 0.5,
                    "val-aux/camshaft/arithmetic/correct/mean@1": 0.75,
                    "val/reward/mean": 0.8,
                },
            ]
            (log.with_suffix("") / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        return 2.0, 1.0

    def both() -> Any:
        few.write_problems("arithmetic", tmp_path / "arithmetic" / "data")
        few.warm_up("arithmetic", tmp_path)
        return few.train("arithmetic", "grpo", 0, tmp_path)

    monkeypatch.setattr(few, "camshaft", camshaft)
    (interrupted := tmp_path / "arithmetic" / "grpo_0").mkdir(parents=True)
    (interrupted / "run.json").write_text('{"status": "running"}', encoding="utf-8")
    first = both()
    assert (first.steps, first.correct, first.score, first.sampled) == ([0, 2], [0.25, 0.75], [0.3, 0.8], [0.4, 0.5])
    assert both() == first
    assert ran == ["sft", "ppo"]
    monkeypatch.setitem(few.TRAINING, "actor_rollout_ref.actor.optim.lr", 1e-5)
    both()
    assert ran == ["sft", "ppo", "ppo"]
    monkeypatch.setitem(few.TASKS, "arithmetic", replace(few.TASKS["arithmetic"], num_train=199))
    both()
    assert ran == ["sft", "ppo", "ppo", "sft", "ppo"]


@pytest.mark.slow
def test_a_failed_run_shows_the_end_of_its_log(learning: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"status 2, .*ppo\.log: (.|\n)*no_such_key"):
        learning.camshaft(["ppo", "no_such_key=1"], tmp_path / "ppo.log")
