"""Conditions under which `camshaft generate` resumes the parts of an earlier run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command_line import generate_args
from support.ppo_runs import ppo_args

from camshaft.config import load_generate
from camshaft.data.tables import write_parquet
from camshaft.models.loader import load_tokenizer
from camshaft.trainer.generate import GenerateRun, collect_settings

ROW = {"prompt": "1+1=", "data_source": "arithmetic", "ground_truth": "2", "extra_info": {"index": 1}}
SCORED = {"custom_reward_function.name": "exact_match"}


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    ppo_args(home)
    return home


def run_settings(home: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    run = GenerateRun(load_generate(generate_args(home, overrides)))
    return collect_settings(run.config, run.prompts)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_every_byte_of_the_model_and_of_the_tokenizer_counts(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "actor", tmp_path / "model")
    shutil.copytree(home / "actor", tmp_path / "tokenizer")
    more = tmp_path / "model" / "more.bin"
    more.write_bytes(bytes(300_000))
    both = {"model.path": tmp_path / "model", "data.tokenizer": tmp_path / "tokenizer"}
    before = run_settings(home, both)
    flipped(more, 150_000)
    assert differing(before, run_settings(home, both)) == ["the model"]
    flipped(more, 150_000)
    (tmp_path / "tokenizer" / "special.txt").write_text("x")
    assert differing(before, run_settings(home, both)) == ["the tokenizer"]


def test_reward_settings_matter_only_with_scores(home: Path, tmp_path: Path) -> None:
    path, reward = tmp_path / "in.parquet", tmp_path / "reward.py"
    body = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return "
    reward.write_text(body + "1.0")
    for scored in (SCORED, {"custom_reward_function.path": reward}):
        write_parquet(path, [ROW])
        before = run_settings(home, {"data.path": path, **scored})
        for changed in ({"ground_truth": "3"}, {"data_source": "other"}, {"extra_info": {"index": 2}}):
            write_parquet(path, [ROW | changed])
            assert differing(before, run_settings(home, {"data.path": path, **scored})) == ["the reward inputs"]
        write_parquet(path, [ROW | {"note": "x"}])  # irrelevant to generation and scoring
        assert before == run_settings(home, {"data.path": path, **scored})
    reward.write_text(body + "2.0")
    assert differing(before, run_settings(home, {"data.path": path, **scored})) == ["the reward function"]
    write_parquet(path, [ROW])
    before = run_settings(home, {"data.path": path})
    write_parquet(path, [ROW | {"ground_truth": "3"}])
    assert before == run_settings(home, {"data.path": path})


@pytest.mark.parametrize(
    "word",
    [
        {"data.batch_size": 3},
        {"custom_reward_function.timeout": 3.0},
        {"custom_reward_function.num_workers": 3},
        {"rollout.max_num_seqs": 3},
        {"rollout.load_format": "auto"},
        {"trainer.n_gpus_per_node": 2},
        {"+ray_kwargs.ray_init.address": "auto"},
    ],
    ids=lambda word: next(iter(word)),
)
def test_keys_that_change_no_response_may_change(word: dict[str, Any], home: Path) -> None:
    assert run_settings(home, SCORED) == run_settings(home, SCORED | word)


def test_no_secret_is_written_with_the_responses(home: Path) -> None:
    secret = {
        "+ray_kwargs.ray_init._redis_password": "hunter2",
        "+custom_reward_function.reward_kwargs.api_key": "hunter2",
    }
    facts = run_settings(home, SCORED | secret)
    assert facts["custom_reward_function.reward_kwargs"] == {"api_key": "***"}
    assert "hunter2" not in str(facts)


def test_a_separate_tokenizer_needs_no_model_next_to_it(home: Path, tmp_path: Path) -> None:
    load_tokenizer(str(home / "actor")).save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert "the tokenizer" in run_settings(home, {"data.tokenizer": tmp_path})


def test_keys_that_change_responses_or_scores_may_not(home: Path) -> None:
    before = run_settings(home, SCORED)
    for key, value in {
        "rollout.temperature": 0.5,
        "rollout.name": "hf",
        "rollout.dtype": "bfloat16",
        "trainer.seed": 9,
        "custom_reward_function.name": "auto",
    }.items():
        assert key in differing(before, run_settings(home, {**SCORED, key: value}))
    # It matters for a generator that reads it.
    vllm = {"rollout.name": "vllm", "rollout.tensor_model_parallel_size": 1}
    for name, differ in (({}, True), (vllm, True), ({"rollout.name": "hf"}, False)):
        eager = [run_settings(home, name | {"rollout.enforce_eager": value}) for value in (True, False)]
        assert differing(*eager) == ["rollout.enforce_eager"] * differ
