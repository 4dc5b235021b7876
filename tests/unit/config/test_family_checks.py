"""Families that an engine or the built-in rollout does not support are config errors, before torch is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from camshaft.config import load_generate, load_ppo, load_rm, load_sft
from camshaft.errors import ConfigError

LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
DYNAMIC = {"rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 64}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def write(folder: Path, values: dict[str, Any]) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(values))


def error(load: Any, words: list[str]) -> str:
    with pytest.raises(ConfigError) as raised:
        load(words)
    return str(raised.value)


def test_an_unsupported_family_is_one_problem_with_all_reasons(sft_words: list[str], tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "xlnet", "logits_scaling": 2.0})
    text = error(load_sft, sft_words)
    assert text.startswith("1 error in the config")
    assert f"model.path = {tmp_path}/model" in text
    assert "xlnet models have attention that is not causal and attention code that does not use" in text
    assert "logits that change after the output layer (logits_scaling=2.0)" in text
    assert "choose another model family, such as gpt2." in text


def test_values_of_the_file_and_overrides_precede_the_defaults(words: list[str], tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "lfm2"})
    assert "(layer_types contains conv)" in error(load_ppo, words)
    write(tmp_path, {"model_type": "lfm2", "layer_types": ["full_attention"]})
    load_ppo(words)
    override = '+actor_rollout_ref.model.override_config.layer_types=["linear_attention"]'
    assert "(layer_types contains linear_attention)" in error(load_ppo, [*words, override])


def test_the_text_model_of_a_composite_is_checked(words: list[str], tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "qwen3_5_moe", "text_config": {"model_type": "xlm"}})
    assert "xlm models have attention that is not causal" in error(load_ppo, words)


def test_each_head_is_checked_for_itself(words: list[str], sft_words: list[str], tmp_path: Path) -> None:
    write(tmp_path, LLAMA | {"logits_scaling": 2.0})
    assert "llama models have logits that change" in error(load_sft, sft_words)
    load_rm(sft_words)
    text = error(load_ppo, [*words, "algorithm.adv_estimator=gae"])
    assert text.startswith("1 error in the config")
    assert "critic" not in text


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        (
            {"model_type": "mixtral"},
            ["fsdp_config.tensor_parallel_size=2"],
            "not supported for mixtral models: its layer",
        ),
        (
            LLAMA,
            ["fsdp_config.tensor_parallel_size=4"],
            "num_key_value_heads=2 of this llama model is not divisible by",
        ),
        (LLAMA, ["ulysses_sequence_parallel_size=8"], "num_attention_heads=4 of this llama model is not divisible by"),
        (
            LLAMA | DYNAMIC,
            ["ulysses_sequence_parallel_size=2"],
            "which sequence parallelism does not support. Set ulys",
        ),
        ({"model_type": "gpt2"}, ["model.lora_rank=4"], "LoRA is not supported for gpt2 models"),
        ({"model_type": "phi3"}, ["strategy=megatron"], "does not support phi3 models, only llama, qwen2, qwen3"),
        (LLAMA | {"mlp_bias": True}, ["strategy=megatron"], "does not support llama models with mlp_bias=True"),
        (
            LLAMA,
            ["strategy=megatron", "+engine_kwargs.pipeline_model_parallel_size=2"],
            "num_hidden_layers=3 is not div",
        ),
        (LLAMA | {"hidden_act": "gelu"}, ["strategy=torchtitan"], "supports llama models only with hidden_act=silu"),
    ],
)
def test_engines_and_layouts_are_checked_with_the_model(
    sft_words: list[str], tmp_path: Path, values: dict[str, Any], settings: list[str], message: str
) -> None:
    words = [*sft_words, "strategy=fsdp", "trainer.n_gpus_per_node=8", "trainer.controller=ray", *settings]
    write(tmp_path, values)
    assert message in error(load_sft, words)


def test_generation_is_checked_with_the_model(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    generate = [f"model.path={tmp_path}/model", f"data.path={tmp_path}/prompts.jsonl", "trainer.device=cpu"]
    write(tmp_path, {"model_type": "mpt"})
    assert "which packed rows do not support. Set rollout.name=hf." in error(
        load_generate, [*generate, "rollout.name=torch"]
    )
    load_generate([*generate, "rollout.name=hf"])
    write(tmp_path, LLAMA | DYNAMIC)
    lengths = ["data.max_prompt_length=40", f"{ROLLOUT}.response_length=30"]
    text = error(load_ppo, [*words, *lengths])
    assert "= 70 tokens, but the 'dynamic' rotary frequencies" in text
    load_ppo([*words, "data.max_prompt_length=30", f"{ROLLOUT}.response_length=30"])


def test_a_command_rejects_a_family_within_seconds_without_torch(words: list[str], tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "xlnet"})
    code = (
        "import sys, time\nfrom camshaft.config import load_ppo\nfrom camshaft.errors import ConfigError\n"
        f"try:\n    load_ppo({words!r})\nexcept ConfigError as error:\n"
        "    print(time.process_time(), [m for m in ('torch', 'transformers') if m in sys.modules], error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    seconds, _, rest = run.stdout.partition(" ")
    assert rest.startswith("[] 1 error")
    assert "xlnet models have attention that is not causal" in rest
    assert float(seconds) < 5
