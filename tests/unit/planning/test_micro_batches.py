"""Micro-batches of a run on GPUs have as many tokens as its forecast lets fit in their memory."""

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from camshaft.checkpoint.manager import LATEST
from camshaft.config import PPOConfig, SFTConfig
from camshaft.config.auto.table import format_choices
from camshaft.config.tree import flatten, get
from camshaft.planning import micro_batches
from camshaft.planning.devices import GIB
from camshaft.planning.micro_batches import choose_limits, fit_micro_batches, limits_as_overrides, usable
from camshaft.planning.plan import MICRO_BATCHES, Schema, compose_run, make_plan
from camshaft.tracking.run_folder import INFO

ACTOR = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
REFERENCE = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
SFT = "data.max_token_len_per_gpu"
SHAPES = {"wide": (2048, 11008, 2, 32000), "deep": (896, 4864, 12, 16000)}
"""Hidden size, intermediate size, layers and vocabulary size."""
KEYS = ["val_data=null", "device=cuda", "devices=1", "engine=fsdp"]
LONGER = "response_length=5000"
GRPO = ["algorithm=grpo", "reward=exact_match", "rollout=torch", "prompt_length=256", "response_length=256", "batch=64"]


@pytest.fixture
def words(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return the words of a run whose model has a shape."""

    def describe(shape: str) -> list[str]:
        hidden, intermediate, layers, vocabulary = SHAPES[shape]
        config: dict[str, Any] = {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": vocabulary,
            "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64, "num_key_value_heads": 2, "max_position_embeddings": 8192,
            "tie_word_embeddings": True, "eos_token_id": 1,
        }  # fmt: skip
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        row = {"prompt": "1+2=", "response": "3", "answer": "3"}
        (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
        return [f"model={tmp_path}/model", f"data={tmp_path}/train.jsonl", f"out={tmp_path}/run", *KEYS]

    return describe


def peak(overrides: list[str], memory: int, schema: Schema) -> int:
    """Return the peak of the phases with micro-batches, from `camshaft plan`."""
    plan = make_plan(compose_run(overrides, schema), memory)
    return max(row.peak for row in plan.rows if row.phase in MICRO_BATCHES)


def check_limits(overrides: list[str], schema: Schema, gigabytes: float, key: str, most: int) -> int:
    """Check that the chosen number fits and that twice it does not. Return it. Runs in a process of its own."""
    memory = int(gigabytes * GIB)
    limits, _ = choose_limits(compose_run(overrides, schema), memory)
    tokens = limits[key]
    assert peak([*overrides, f"{key}={tokens}"], memory, schema) <= usable(memory)
    if tokens < most:
        assert peak([*overrides, f"{key}={2 * tokens}"], memory, schema) > usable(memory)
    return tokens


@pytest.mark.parametrize(
    ("shape", "algorithm", "gigabytes", "tokens"),
    [("wide", "grpo", 8, 4096), ("deep", "grpo", 24, 16384), ("deep", "sft", 8, 2048), ("wide", "sft", 80, 8192)],
)
def test_the_chosen_tokens_fit_and_twice_as_many_do_not(
    words: Callable[[str], list[str]],
    process: ProcessPoolExecutor,
    shape: str,
    algorithm: str,
    gigabytes: int,
    tokens: int,
) -> None:
    schema: Schema = SFTConfig if algorithm == "sft" else PPOConfig
    overrides = [*words(shape), *(["max_length=512"] if algorithm == "sft" else GRPO)]
    key, most = (SFT, 8192) if algorithm == "sft" else (ACTOR, 16384)
    chosen = process.submit(check_limits, overrides, schema, gigabytes, key, most).result(timeout=300)
    assert chosen == tokens


def test_a_run_prints_and_records_the_tokens_that_fit(
    words: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The resumed run keeps them without a forecast, unless a sequence has become longer."""
    script = micro_batches.SCRIPT.replace("device_memory(config.trainer.device)", str(8 * GIB))
    monkeypatch.setattr(micro_batches, "SCRIPT", script)
    overrides = [*words("wide"), *GRPO]
    config = fit_micro_batches(compose_run(overrides, PPOConfig))
    assert f"  {ACTOR}=4096  tokens per micro-batch, as many as fit in 8 GiB\n" in format_choices(config)
    assert get(config.model_dump(), REFERENCE) == 4096
    assert limits_as_overrides(config) == [f"{ACTOR}=4096"]

    monkeypatch.setattr(micro_batches, "SCRIPT", "a resumed run, and one with another learning rate, start no process")
    swept = compose_run([*overrides, "lr=2e-6", "seed=7", f"out={tmp_path}/other"], PPOConfig)
    assert limits_as_overrides(fit_micro_batches(swept)) == [f"{ACTOR}=4096"]
    longer = compose_run([*overrides, LONGER], PPOConfig)
    assert limits_as_overrides(fit_micro_batches(longer)) == [f"{ACTOR}=16384"]
    monkeypatch.setattr(micro_batches, "_forecasts", {})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / INFO).write_text(json.dumps({"config": flatten(config.model_dump(), ())}))
    assert limits_as_overrides(fit_micro_batches(compose_run(overrides, PPOConfig))) == [f"{ACTOR}=16384"]
    (tmp_path / "run" / LATEST).write_text("1")
    resumed = fit_micro_batches(compose_run(overrides, PPOConfig))
    assert f"  {ACTOR}=4096  tokens per micro-batch, as at the first start\n" in format_choices(resumed)
    assert limits_as_overrides(fit_micro_batches(longer)) == [f"{ACTOR}=16384"]


@pytest.mark.parametrize(
    "changes",
    [
        ["device=cpu"],
        [f"{ACTOR}=5000"],
        ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"],
        ["actor_rollout_ref.actor.use_dynamic_bsz=false"],
    ],
)
def test_limits_that_are_set_and_runs_on_a_cpu_have_no_forecast(
    words: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch, changes: list[str]
) -> None:
    monkeypatch.setattr(micro_batches, "answer_in_process", None)
    config = compose_run([*words("wide"), *GRPO, *changes], PPOConfig)
    assert fit_micro_batches(config) is config


def test_the_largest_numbers_remain_without_a_forecast(
    words: Callable[[str], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """This machine has no GPU."""
    config = compose_run([*words("wide"), *GRPO], PPOConfig)
    assert fit_micro_batches(config) is config
    assert "default limits, because the run has no forecast: this machine has no cuda device" in caplog.text


def test_the_fewest_tokens_are_those_of_the_longest_sequence(
    words: Callable[[str], list[str]], process: ProcessPoolExecutor
) -> None:
    config = compose_run([*words("wide"), *GRPO], PPOConfig)
    limits, reason = process.submit(choose_limits, config, GIB).result(timeout=300)
    assert (limits[ACTOR], limits[REFERENCE]) == (512, 512)
    assert reason == "the fewest, but the run does not fit in 1 GiB by the forecast of camshaft plan"
