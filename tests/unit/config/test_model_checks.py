"""Lengths and tokenizers are checked against the files of the model, and dropout and a missing EOS are reported."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from camshaft.config import load_generate, load_ppo, load_rm, load_sft
from camshaft.config.model_settings import DEFAULT_DROPOUT, ModelSettings
from camshaft.errors import ConfigError

DECODER = {"model_type": "llama", "vocab_size": 8, "eos_token_id": 1, "max_position_embeddings": 24}
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
LENGTHS = ["data.max_prompt_length=16", "data.max_response_length=9"]
FITS = ["data.max_prompt_length=16", "data.max_response_length=8"]
YARN = {"rope_type": "yarn", "factor": 4.0}


def write(folder: Path, settings: dict[str, Any], vocabulary: int = 8, name: str = "model") -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(settings))
    tokens = {f"t{index}": index for index in range(vocabulary)}
    (folder / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))


def error(load: Any, settings: list[str]) -> str:
    with pytest.raises(ConfigError) as raised:
        load(settings)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "key", "can_scale"),
    [
        ("llama", "max_position_embeddings", True),
        ("opt", "max_position_embeddings", False),
        ("gpt2", "n_positions", False),
    ],
)
def test_lengths_must_fit_the_positions_of_the_model(
    words: list[str], tmp_path: Path, kind: str, key: str, can_scale: bool
) -> None:
    write(tmp_path, {"model_type": kind, "vocab_size": 8, "eos_token_id": 1, key: 24})
    load_ppo([*words, *FITS])
    text = error(load_ppo, [*words, *LENGTHS])
    assert f"{key}=24 positions" in text
    assert "data.max_prompt_length=16 + actor_rollout_ref.rollout.response_length=9 = 25 tokens" in text
    assert "to at most 24 tokens in total" in text
    assert ("rope_scaling" in text) == can_scale


@pytest.mark.parametrize(
    "scaled",
    [
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        {"rope_parameters": YARN},
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
        {"text_config": {"rope_scaling": YARN}},
        {"alibi": True},
    ],
)
def test_scaled_positions_are_unlimited(words: list[str], tmp_path: Path, scaled: dict[str, Any]) -> None:
    write(tmp_path, {**DECODER, **scaled})
    load_ppo([*words, *LENGTHS])


@pytest.mark.parametrize("unscaled", [{"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": None}])
def test_unscaled_positions_are_limited(words: list[str], tmp_path: Path, unscaled: dict[str, Any]) -> None:
    write(tmp_path, {**DECODER, **unscaled})
    assert "24 positions" in error(load_ppo, [*words, *LENGTHS])
    more = [
        f"{section}.override_config.max_position_embeddings=25"
        for section in ("actor_rollout_ref.model", "critic.model")
    ]
    load_ppo([*words, *LENGTHS, *more])


def test_positions_can_be_overridden_under_both_names(words: list[str], tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "gpt2", "vocab_size": 8, "eos_token_id": 1, "n_positions": 24})
    for key in ("n_positions", "max_position_embeddings"):
        more = [f"{section}.override_config.{key}=25" for section in ("actor_rollout_ref.model", "critic.model")]
        load_ppo([*words, *LENGTHS, *more])


def test_critic_and_reward_model_have_positions_too(words: list[str], tmp_path: Path) -> None:
    write(tmp_path, {**DECODER, "max_position_embeddings": 99})
    for name, section in {"critic": "critic.model", "rm": "reward_model.model"}.items():
        write(tmp_path, DECODER, name=name)
        more = [f"{section}.path={tmp_path}/{name}", "reward_model.enable=true"]
        more += [] if name == "rm" else [f"reward_model.model.path={tmp_path}/model"]
        assert f"{section}.path" in error(load_ppo, [*words, *LENGTHS, *more])
    load_ppo([*words, *LENGTHS, *more, "reward_model.max_length=24"])


def test_sequences_of_other_commands_are_checked(sft_words: list[str], tmp_path: Path) -> None:
    write(tmp_path, DECODER)
    for load in (load_sft, load_rm):
        assert "data.max_length=25 tokens. Set data.max_length to at most 24 tokens" in error(
            load, [*sft_words, "data.max_length=25"]
        )
        load([*sft_words, "data.max_length=24"])
    generate = [f"model.path={tmp_path}/model", f"data.path={tmp_path}/train.parquet", "trainer.device=cpu"]
    generate += [f"data.output_path={tmp_path}/out.parquet", "rollout.prompt_length=16"]
    text = error(load_generate, [*generate, "rollout.response_length=9"])
    assert "rollout.prompt_length=16 + rollout.response_length=9 = 25 tokens" in text
    load_generate([*generate, "rollout.response_length=8"])


def test_cache_of_one_sequence_must_fit_in_memory(words: list[str], tmp_path: Path) -> None:
    write(tmp_path, {**DECODER, **SIZES, "rope_scaling": YARN})
    text = error(
        load_ppo, [*words, "data.max_response_length=1000000000000", "actor_rollout_ref.rollout.dtype=bfloat16"]
    )
    # 2 (keys and values) x 4 layers x 2 heads x 8 numbers x 2 bytes = 256 bytes per token
    assert "takes 238,419 GiB" in text
    assert "actor_rollout_ref.rollout.response_length=1000000000000" in text
    load_ppo([*words, "data.max_response_length=100000"])


@pytest.mark.parametrize(("vocabulary", "fits"), [(8, True), (9, False)])
def test_vocabulary_must_fit_the_embedding(words: list[str], tmp_path: Path, vocabulary: int, fits: bool) -> None:
    write(tmp_path, DECODER, vocabulary)
    if fits:
        load_ppo([*words, *FITS])
    else:
        assert "token IDs up to 8" in error(load_ppo, [*words, *FITS])


@pytest.mark.parametrize(
    ("eos", "settings", "problem"),
    [
        (1, [], None),
        (None, [], "it has no end-of-sequence token"),
        (8, [], "its end-of-sequence token [8] is outside the vocabulary of 8 tokens"),
        (None, ["actor_rollout_ref.rollout.stop_token_ids=[3]"], None),
        (None, ["actor_rollout_ref.rollout.ignore_eos=true"], None),
    ],
)
def test_generation_without_an_end_is_reported(
    words: list[str], tmp_path: Path, eos: int | None, settings: list[str], problem: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write(tmp_path, {**DECODER, "eos_token_id": eos})
    with caplog.at_level(logging.WARNING, "camshaft.config"):
        load_ppo([*words, *FITS, *settings])
    messages = [message for message in caplog.messages if "actor_rollout_ref.model.path" in message]
    assert len(messages) == (problem is not None)
    assert problem is None or problem in messages[0]


def test_end_token_of_the_tokenizer_or_of_generation_counts(
    words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {**DECODER, "eos_token_id": None})
    for name, content in {
        "generation_config.json": {"eos_token_id": [2, 3]},
        "tokenizer_config.json": {"eos_token": {"content": "t5"}},
    }.items():
        (tmp_path / "model" / name).write_text(json.dumps(content))
        with caplog.at_level(logging.WARNING, "camshaft.config"):
            load_ppo([*words, *FITS])
        (tmp_path / "model" / name).unlink()
    assert caplog.messages == []


def test_dropout_is_reported_with_the_settings_that_disable_it(
    words: list[str], sft_words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {**DECODER, "attention_dropout": 0.25, "classifier_dropout": 0.5})
    grpo = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
    words = [word for word in words if "critic" not in word]
    with caplog.at_level(logging.WARNING, "camshaft.config"):
        load_ppo([*words, *FITS, *grpo])
        (message,) = caplog.messages
        assert "training uses dropout (attention_dropout=0.25)" in message
        setting = message.rpartition(" ")[2]
        assert setting == "actor_rollout_ref.model.override_config.attention_dropout=0.0"
        caplog.clear()
        load_ppo([*words, *FITS, *grpo, setting])
        assert caplog.messages == []
        load_sft([*sft_words, "data.max_length=24", "data.val_files=null"])
    assert "model.override_config.attention_dropout=0.0" in caplog.text


@pytest.mark.parametrize(
    ("values", "settings", "reason"),
    [
        ({"model_type": "qwen3_next"}, [], "qwen3_next models with this config have a recurrent state."),
        (
            {"model_type": "mamba"},
            ["actor_rollout_ref.rollout.name=hf"],
            "mamba models with this config have right-padded rows.",
        ),
        ({"model_type": "mistral", "sliding_window": 8}, [], "have a sliding window (sliding_window=8)."),
        ({"model_type": "llama"}, [], None),
        ({"model_type": "qwen3_next"}, ["actor_rollout_ref.model.use_prefix_grouper=false"], None),
    ],
)
def test_prefix_sharing_that_the_family_prevents_is_reported_once(
    values: dict[str, Any], settings: list[str], reason: str | None, words: list[str], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write(tmp_path, {**DECODER, **values})
    words = [*(word for word in words if "critic" not in word), *FITS, "algorithm.adv_estimator=grpo"]
    with caplog.at_level(logging.WARNING, "camshaft.config"):
        load_ppo([*words, "actor_rollout_ref.rollout.n=2", *settings])
    messages = [text for text in caplog.messages if "prefix sharing" in text]
    assert len(messages) == (reason is not None)
    fix = "set actor_rollout_ref.model.use_prefix_grouper=false to omit this notice"
    assert all(str(reason) in message and message.endswith(fix) for message in messages)


def test_prompt_length_of_the_rollout_that_no_prompt_reaches_is_reported(
    words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    key = "actor_rollout_ref.rollout.prompt_length"
    with caplog.at_level(logging.WARNING, "camshaft.config"):
        load_ppo([*words, "data.max_prompt_length=16", f"{key}=16"])
        assert caplog.messages == []
        load_ppo([*words, "data.max_prompt_length=16", f"{key}=17"])
    (message,) = caplog.messages
    assert f"{key}=17 does not allow prompts of more than data.max_prompt_length=16 tokens" in message


@pytest.mark.parametrize(
    ("stop", "is_reported"),
    [
        (r"['\n\n']", True),
        (r"['\nUser:']", True),
        (r"['\nabla']", False),
        ("['\n\n']", False),
        (r"[END,'\n']", True),
        ("[END]", False),
    ],
)
def test_stop_string_with_a_backslash_is_reported(
    stop: str, is_reported: bool, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("actor_rollout_ref.rollout.stop", "actor_rollout_ref.rollout.val_kwargs.stop"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "camshaft.config"):
            load_ppo([*words, f"{key}={stop}"])
        assert len([message for message in caplog.messages if f"""$'{key}=["\\n"]'""" in message]) == is_reported


def test_default_dropout_matches_transformers() -> None:
    for kind, expected in DEFAULT_DROPOUT.items():
        assert ModelSettings({"model_type": kind}).dropout() == expected
        assert ModelSettings(CONFIG_MAPPING[kind]().to_dict()).dropout() == expected


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_old_log_probs_do_not_come_from_a_pass_with_dropout(words: list[str], tmp_path: Path, dropout: float) -> None:
    write(tmp_path, {**DECODER, "attention_dropout": dropout})
    config = load_ppo([*words, *FITS, "actor_rollout_ref.actor.ppo_mini_batch_size=1024"])
    assert config.old_log_prob_source() == ("actor" if dropout else "update")


def test_actor_must_be_trained_after_the_critic_warmup(words: list[str]) -> None:
    text = error(load_ppo, [*words, "trainer.critic_warmup=4", "trainer.total_training_steps=4"])
    assert "the first 4 iterations train only the critic, and the run has 4" in text
    load_ppo([*words, "trainer.critic_warmup=3", "trainer.total_training_steps=4"])


# -- data sets of the hub -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "section", "data"),
    [
        (load_ppo, "actor_rollout_ref.model", "data.train_files"),
        (load_sft, "model", "data.train_files"),
        (load_generate, "model", "data.path"),
    ],
)
def test_data_sets_are_not_downloaded_if_that_is_forbidden(
    load: Any, section: str, data: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "cache"))
    model = [f"actor_rollout_ref.model.path={tmp_path}/model", "trainer.device=cpu"]
    keys = model if load is load_ppo else [f"model.path={tmp_path}/model", "trainer.device=cpu"]
    settings = [*keys, f"{data}=nobody/sums:test", "download=false"]
    file = tmp_path / "cache" / "datasets" / "nobody" / "sums" / "test.parquet"
    text = error(load, settings)
    assert "1 error in the config" in text
    assert f"{data} = nobody/sums:test" in text
    assert f"the data set is not in the cache ({file}). Set {section}.download=true to download it, or set the" in text
    file.parent.mkdir(parents=True)
    file.touch()
    load(settings)
