"""Keys of the reward model: derived configs and checks."""

import json
from pathlib import Path

import pytest

from camshaft.config import Topology, batch_table, load_ppo, render_batch_table, reward_engine
from camshaft.errors import ConfigError

MODEL, INPUT = "reward_model.model", "reward_model.model.input_tokenizer"


@pytest.fixture
def on(words: list[str], tmp_path: Path) -> list[str]:
    """Return overrides of a run with a reward model in `rm`."""
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / "config.json").write_text("{}")
    return [*words, "reward_model.enable=true", f"{MODEL}.path={tmp_path}/rm"]


def error(words: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_ppo(words)
    return str(caught.value)


def with_tokenizer(folder: Path, *tokens: str) -> None:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))


# -- derived configs ------------------------------------------------------------------------------


def test_disabled_reward_model_is_not_checked(words):
    config = load_ppo([*words, f"{MODEL}.path=/nowhere", "reward_model.strategy=referense", f"{INPUT}=/nowhere"])
    assert (config.needs_function(), config.needs_reward_engine(), config.needs_raw_chat()) == (True, False, False)


def test_engine_config_is_forward_only_with_a_reward_head(on, tmp_path):
    overrides = [f"+{MODEL}.override_config.attention_dropout=0.0", "reward_model.use_dynamic_bsz=false"]
    engine = reward_engine(load_ppo([*on, *overrides]), Topology(8))
    assert (engine.model.path, engine.model.head, engine.optim) == (f"{tmp_path}/rm", "reward", None)
    assert engine.model.override_config == {"attention_dropout": 0.0}
    assert (engine.infer_micro_batch_size, engine.infer_max_tokens) == (8, None)  # 64 / 8
    assert engine.options == {"mixed_precision": {"param_dtype": None}}
    engine = reward_engine(load_ppo([*on, "reward_model.micro_batch_size_per_gpu=3"]), Topology(8))
    assert engine.infer_micro_batch_size == 3
    engine = reward_engine(load_ppo(on), Topology(8))
    assert (engine.infer_micro_batch_size, engine.infer_max_tokens) == (None, 4096)


def test_reward_model_has_a_separate_layout(on):
    words = [*on, "actor_rollout_ref.actor.strategy=fsdp", "trainer.n_gpus_per_node=4"]
    words += ["reward_model.ulysses_sequence_parallel_size=2", f"{MODEL}.fsdp_config.param_offload=true"]
    words += ["reward_model.micro_batch_size=64"]
    config = load_ppo([*words, f"{MODEL}.fsdp_config.wrap_policy.min_num_params=7"])
    engine = reward_engine(config, Topology(4))
    assert (config.reward_model.strategy, engine.options["ulysses_sequence_parallel_size"]) == ("fsdp", 2)
    assert (engine.options["param_offload"], engine.options["wrap_policy"]["min_num_params"]) == (True, 7)
    assert engine.infer_micro_batch_size == 32  # 64 over 4 / 2 groups


def test_min_num_params_is_an_alias(on):
    words = [*on, "actor_rollout_ref.actor.strategy=fsdp", f"+{MODEL}.fsdp_config.min_num_params=9"]
    assert load_ppo(words).reward_model.model.fsdp_config.wrap_policy.min_num_params == 9


def test_messages_are_kept_if_needed_or_requested(on, words):
    assert load_ppo(on).needs_raw_chat()  # the default has a tokenizer of the policy
    assert not load_ppo([*on, f"{INPUT}=null"]).needs_raw_chat()
    assert not load_ppo([*on, "data.return_raw_input_ids=true"]).needs_raw_chat()
    assert load_ppo([*words, "data.return_raw_chat=true"]).needs_raw_chat()


def test_scoring_function_is_optional_only_with_a_reward_model(on, words):
    assert load_ppo(on).needs_function()
    assert not load_ppo([*on, "custom_reward_function.name=null"]).needs_function()
    assert load_ppo([*words, "custom_reward_function.name=null"]).needs_function()


def test_batch_table_has_a_reward_column(on, words):
    sizes = ["reward_model.micro_batch_size_per_gpu=3", "actor_rollout_ref.actor.use_dynamic_bsz=false"]
    text = render_batch_table(batch_table(load_ppo([*on, *sizes]), Topology()))
    lines = {line[:30].strip(): line[30:].split() for line in text.splitlines()}
    assert lines[""][:4] == ["actor", "ref", "critic", "reward"]
    assert lines["forward micro-batch per rank"][:4] == ["16", "-", "8", "3"]
    assert "reward" not in render_batch_table(batch_table(load_ppo(words), Topology()))


# -- checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "phrases"),
    [
        ([f"{MODEL}.path=/nowhere/rm"], [f"{MODEL}.path = /nowhere/rm", "folder not found"]),
        (["reward_model.strategy=fdsp"], ["reward_model.strategy = fdsp", "Did you mean fsdp"]),
        (["reward_model.worker_cls=Mine"], ["reward_model.worker_cls = Mine", "must be package.module:Class"]),
        ([f"{INPUT}=/nowhere"], [f"{INPUT} = /nowhere", "folder not found"]),
        ([f"{INPUT}=null", "data.return_raw_input_ids=true"], ["data.return_raw_input_ids", "has no effect", INPUT]),
        (
            ["data.max_prompt_length=512", "reward_model.forward_max_token_len_per_gpu=1023"],
            ["data.max_prompt_length + rollout.response_length = 1024", "=1024 or more"],
        ),
        (
            [
                "reward_model.use_dynamic_bsz=true",
                "reward_model.forward_max_token_len_per_gpu=1024",
                "reward_model.max_length=2000",
            ],
            ["reward_model.max_length = 2000", "Set reward_model.forward_max_token_len_per_gpu=2000 or more"],
        ),
        (["reward_model.ulysses_sequence_parallel_size=2"], ["does not support this key", "reward_model.strategy"]),
        (
            [f"{MODEL}.fsdp_config.param_offload=true"],
            [f"{MODEL}.fsdp_config.param_offload", "does not support this key"],
        ),
        (["custom_reward_function.name=gsm"], ["custom_reward_function.name = gsm", "Did you mean gsm8k?"]),
    ],
)
def test_invalid_reward_model_is_rejected_with_a_fix(on, more, phrases):
    text = error([*on, *more])
    assert "1 error in the config" in text
    assert [phrase for phrase in phrases if phrase not in text] == [], text


def test_reward_batches_must_split_evenly_over_ranks(on):
    many = ["actor_rollout_ref.actor.strategy=fsdp", "trainer.n_gpus_per_node=4"]
    text = error([*on, *many, "reward_model.micro_batch_size=6"])
    assert "reward_model.micro_batch_size = 6" in text
    assert "6 = 4 ranks x 1 + 2" in text
    assert "Set reward_model.micro_batch_size_per_gpu=1" in text
    text = error([*on, *many, f"{MODEL}.fsdp_config.tensor_parallel_size=3"])
    assert f"{MODEL}.fsdp_config.tensor_parallel_size = 3" in text
    assert "strategy=reference supports only one process" in error([*on, *many, "reward_model.strategy=reference"])


def test_input_tokenizer_is_compared_with_the_policy(on, tmp_path):
    with_tokenizer(tmp_path / "model", "a", "b")
    with_tokenizer(tmp_path / "rm", "a", "b")
    load_ppo([*on, f"{INPUT}=null"])
    with_tokenizer(tmp_path / "rm", "b", "a")
    load_ppo(on)
    text = error([*on, f"{INPUT}=null"])
    assert "the tokenizers differ" in text
    assert f"Set {INPUT}={tmp_path}/model" in text
    text = error([*on, f"{INPUT}={tmp_path}/rm"])
    assert "must be the policy's tokenizer" in text


def test_only_the_name_of_a_custom_worker_is_checked(on):
    overrides = ["reward_model.worker_cls=my_pkg.judge:Judge", f"{MODEL}.path=/nowhere", "reward_model.strategy=mine"]
    assert not load_ppo([*on, *overrides]).needs_reward_engine()
