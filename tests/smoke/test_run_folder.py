"""The run folder of a real run: its page names everything in it, and samples do not change the run."""

import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest
from support import even_digits
from support.command_line import camshaft
from support.ppo_runs import ppo_args

from camshaft.tracking import deterministic
from camshaft.tracking.jsonl import read_metrics
from camshaft.tracking.run_folder import RunFolder

PAGE = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text(encoding="utf-8")
OF_EPISODES = ("turns", "stop_reason", "messages", "sampled")
"""Columns of runs with an environment."""
NAMED = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """Train with every column that a file can have, and repeat the run without samples in `plain`."""
    overrides = {
        "actor_rollout_ref.rollout.n": 2,
        "algorithm.use_kl_in_reward": True,
        "custom_reward_function.reward_kwargs": "{api_key: hunter2}",
        "custom_reward_function.path": home / "scored.py",
        "trainer.logger": "[jsonl]",
        "trainer.test_freq": 2,
        "trainer.save_freq": 2,
        "trainer.total_training_steps": 2,
        "data.val_max_samples": 2,
    }
    (home / "scored.py").write_text(
        f"from importlib.machinery import SourceFileLoader as L\n"
        f"even = L('even', {even_digits.__file__!r}).load_module()\n"
        "def score(data_source, solution_str, ground_truth, extra_info, api_key):\n"
        "    value = even.compute_score(data_source, solution_str, ground_truth, extra_info)\n"
        "    return {'score': value, 'length': len(solution_str)}\n"
    )
    assert camshaft("ppo", *ppo_args(home, overrides)).status == 0
    without = {"trainer.samples.enable": False, "trainer.default_local_dir": home / "plain"}
    assert camshaft("ppo", *ppo_args(home, {**overrides, **without})).status == 0
    return home


def test_the_page_names_every_file(home: Path) -> None:
    names = {re.sub(r"\d+", "<n>", path.name) + "/" * path.is_dir() for path in (home / "run").iterdir()} - {".lock"}
    files = {f"{folder}/{re.sub('[0-9]+', '<n>', path.name)}" for folder in ("samples", "validation")
             for path in (home / "run" / folder).iterdir()}  # fmt: skip
    assert {name for name in names | files if name not in NAMED} <= {
        "samples/",
        "validation/",
        "latest_checkpointed_iteration.txt",
    }


@pytest.mark.parametrize("name", ["run.json", "status.json"])
def test_the_page_names_every_key(name: str, home: Path) -> None:
    section = PAGE.partition(f"## {name}\n")[2].partition("\n## ")[0]
    keys = [
        key
        for line in section.splitlines()
        for key in re.findall(r"`(\w+)`", line.partition("| ")[2].partition(" |")[0])
    ]
    assert set(keys[:]) - {"key"} == set(json.loads((home / "run" / name).read_text()))


def test_the_page_names_every_column(home: Path) -> None:
    columns = RunFolder(home / "run").samples(2).column_names
    assert {name for name in columns if name not in NAMED} == {"score/length"}
    section = PAGE.partition("## samples\n")[2].partition("\n## ")[0]
    first_cells = [
        line.partition("| ")[2].partition(" |")[0] for line in section.splitlines() if line.startswith("| `")
    ]
    documented = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert documented - set(columns) == {"score/<name>", *OF_EPISODES}


def test_samples_leave_all_metrics_bitwise_equal(home: Path) -> None:
    with_samples, without = (read_metrics(home / name / "metrics.jsonl") for name in ("run", "plain"))
    assert list(map(deterministic, with_samples)) == list(map(deterministic, without))
    assert RunFolder(home / "plain").sample_steps() == []


def test_scores_and_lengths_are_those_of_the_responses(home: Path) -> None:
    run = RunFolder(home / "run")
    assert run.sample_steps() == [1, 2]
    run.metrics.poll()
    for step in (1, 2):
        rows = run.samples(step).to_pylist()
        scores = [even_digits.compute_score("", row["response"], row["ground_truth"], {}) for row in rows]
        assert [row["score"] for row in rows] == pytest.approx(scores)
        assert [row["score/length"] for row in rows] == [len(row["response"]) for row in rows]
        assert mean(scores) == pytest.approx(run.metrics.at(step)["critic/score/mean"])
        assert mean(row["response_tokens"] for row in rows) == run.metrics.at(step)["response_length/mean"]
        assert len({row["uid"] for row in rows}) == len(rows) // 2


def test_values_per_token_agree_with_the_metrics(home: Path) -> None:
    run = RunFolder(home / "run")
    run.metrics.poll()
    rows = run.samples(1).to_pylist()  # at most 32 responses of 8 tokens: all 16 have values
    assert all(len(row["token_ends"]) == row["response_tokens"] for row in rows)
    entropy = [value for row in rows for value in row["entropy"]]
    gaps = [abs(a - b) for row in rows for a, b in zip(row["old_log_probs"], row["rollout_log_probs"], strict=True)]
    advantages = [value for row in rows for value in row["advantages"]]
    metrics = run.metrics.at(1)
    assert mean(entropy) == pytest.approx(metrics["actor/entropy"], rel=1e-5)
    assert mean(gaps) == pytest.approx(metrics["rollout/log_prob_diff_mean"], rel=1e-3)
    assert (mean(advantages), stdev(advantages)) == pytest.approx((0, 1), abs=1e-5)  # GAE whitens


def test_the_record_has_no_secrets_and_the_final_state(home: Path) -> None:
    run = RunFolder(home / "run")
    assert run.state() == "finished"
    texts = [(home / "run" / name).read_text() for name in ("run.json", "config.yaml", "log.txt")]
    assert "hunter2" not in "".join(texts)
    assert run.config()["custom_reward_function.reward_kwargs.api_key"] == "***"
    assert run.config()["algorithm.use_kl_in_reward"] is True
    assert "run folder: " in texts[2]
