"""Tasks of reasoning-gym: data files, and scores by the rules of each task in reward processes."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from camshaft.data import PromptOptions, load_prompts
from camshaft.data.reasoning_gym import TaskPaths, write_reasoning_gym
from camshaft.data.tables import read_rows
from camshaft.dataproto import Ragged
from camshaft.errors import ConfigError
from camshaft.models.tiny import make_tiny_tokenizer
from camshaft.rewards import reasoning_gym
from camshaft.rewards.manager import RewardManager

TINY: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "allow_negation": False},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 60},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
}
"""Tasks whose answers have a few digits or letters, which a model of single characters can write."""


def write(folder: Path, task: str, **more: Any) -> TaskPaths:
    return write_reasoning_gym(folder, task, **({"num_train": 20, "num_heldout": 5, "settings": TINY[task]} | more))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return read_rows(path, ["prompt", "data_source", "reward_model", "extra_info"]).rows


@pytest.mark.parametrize(
    "task", ["gcd", *(pytest.param(task, marks=pytest.mark.slow) for task in ("chain_sum", "spell_backward"))]
)
def test_a_tiny_model_is_scored_on_a_generated_task(task: str, tmp_path: Path) -> None:
    paths, tokenizer = write(tmp_path, task), make_tiny_tokenizer(tmp_path / "tokenizer")
    batch = load_prompts(paths.train, tokenizer, PromptOptions(max_prompt_length=256)).batch
    answers = [str(truth) for truth in batch["ground_truth"]]
    assert max(map(len, answers)) <= 5
    texts = [text + "!" if row % 2 else text for row, text in enumerate(answers)]
    ids = [tokenizer.encode(text) for text in texts]
    batch = batch.with_columns(responses=Ragged.from_rows(ids, dtype=torch.int64))
    with RewardManager(num_workers=1) as rewards:  # by data_source
        result = rewards.score(batch, lambda rows: tokenizer.batch_decode(rows, skip_special_tokens=True))
    assert result.num_failed == 0
    assert result.scores[::2].tolist() == [1.0] * 10
    assert result.scores[1::2].max() < 1.0
    assert result.answers[0] == answers[0]
    assert result.metrics["reward/correct/mean"] == 0.5


def test_generated_rows_are_reproducible_and_unique(tmp_path: Path) -> None:
    first, again = write(tmp_path / "a", "gcd", seed=3), write(tmp_path / "b", "gcd", seed=3)
    assert rows_of(first.train) == rows_of(again.train)
    assert rows_of(first.train) != rows_of(write(tmp_path / "c", "gcd", seed=4).train)
    questions = [row["prompt"][0]["content"] for path in (first.train, first.test) for row in rows_of(path)]
    assert (len(questions), len(set(questions))) == (25, 25)
    assert rows_of(first.train)[0]["data_source"] == "reasoning_gym/gcd"


def test_scoring_follows_the_settings_of_the_task() -> None:
    # puzzle24 requires numbers within its settings, so an answer can be right for one file and wrong for the other.
    entry = json.dumps({"question": "", "answer": None, "metadata": {"numbers": [8, 3, 1, 1]}})
    scores = [
        reasoning_gym.compute_score(
            "reasoning_gym/puzzle24", "8*3*1*1", "", {"entry": entry, "config": json.dumps({"max_value": most})}
        )["score"]
        for most in (10, 5)
    ]
    assert scores[0] == 1
    assert scores[1] < 1


@pytest.mark.parametrize("text", ["<answer>6</answer>", "<answer>5</answer> no, <answer> 6 </answer> yes", " 6\n"])
def test_answer_is_the_last_tag_or_the_full_response(text: str, tmp_path: Path) -> None:
    row = rows_of(write(tmp_path, "gcd").train)[0]
    text = text.replace("6", row["reward_model"]["ground_truth"])
    assert reasoning_gym.compute_score(row["data_source"], text, "", row["extra_info"])["score"] == 1
    around = reasoning_gym.compute_score(row["data_source"], f"so {text} x", "", row["extra_info"])["score"]
    assert (around == 1) == ("<" in text)


def test_rows_without_an_entry_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"must contain 'entry' and 'config'.*examples/data/reasoning_gym_task\.py"):
        reasoning_gym.compute_score("reasoning_gym/gcd", "6", "6", {})


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("gdc", {"settings": {}}, "no task 'gdc'; use one of .*gcd"),
        ("gcd", {"settings": {"max_vale": 3}}, "invalid settings for gcd: .*max_vale.*max_value="),
        ("gcd", {"settings": {"min_value": 9, "max_value": 3}}, "invalid settings for gcd"),
        ("gcd", {"settings": TINY["gcd"] | {"max_value": 2}}, r"unique questions in 500 draws.*Request fewer"),
        ("gcd", {"num_heldout": 0}, "must be at least 1"),
        ("rearc", {"settings": {}}, "the score of an answer of rearc changes"),
    ],
)
def test_invalid_tasks_and_settings_are_errors(task: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_train": 20, "num_heldout": 5} | more
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        write_reasoning_gym(tmp_path, task, **arguments)


def test_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[3] / "examples" / "data" / "reasoning_gym_task.py"
    main = runpy.run_path(str(script))["main"]
    args = ["--task", "gcd", "--size", "8", "--test_size", "2", "--out", str(tmp_path), "--system", "Think."]
    assert main([*args, "--set", "max_value=30", "--set", "max_numbers=2"]) == 0
    rows = rows_of(tmp_path / "train.parquet")
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert json.loads(rows[0]["extra_info"]["config"])["max_value"] == 30
    assert main([*args, "--set", "max_value"]) == 2
    assert "--set max_value has no value; use name=value" in capsys.readouterr().err
