"""Aliases set their keys with a warning and may not contradict them."""

import logging

import pytest

from camshaft.config import GenerateConfig, PPOConfig, SFTConfig, from_container, load_ppo, load_sft
from camshaft.config.schema.aliases import ALIASES, VALUE_ALIASES
from camshaft.config.tree import fields, get
from camshaft.errors import ConfigError


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "camshaft.config")
    return caplog


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("actor_rollout_ref.model.external_libs=my_pkg", "actor_rollout_ref.model.external_lib", "my_pkg"),
        ("actor_rollout_ref.model.external_libs=[one,two]", "actor_rollout_ref.model.external_lib", "one,two"),
        (
            "actor_rollout_ref.actor.optim.warmup_style=cosine",
            "actor_rollout_ref.actor.optim.lr_scheduler_type",
            "cosine",
        ),
        ("actor_rollout_ref.actor.optim.clip_grad=0.3", "actor_rollout_ref.actor.grad_clip", 0.3),
        ("critic.optim.grad_clip=0.3", "critic.grad_clip", 0.3),
        ("algorithm.gemma=0.9", "algorithm.gamma", 0.9),
        ("data.apply_chat_template_kwargs.a=false", "data.chat_template_kwargs", {"a": False}),
        ("+data.apply_chat_template_kwargs={a: 1}", "data.chat_template_kwargs", {"a": 1}),
        ("reward.custom_reward_function.timeout=3.0", "custom_reward_function.timeout", 3.0),
        ("reward.custom_reward_function.reward_kwargs.a=1", "custom_reward_function.reward_kwargs", {"a": 1}),
        ("trainer.logger=[console,file]", "trainer.logger", ("console", "jsonl")),
        ("trainer.logger=file", "trainer.logger", ("jsonl",)),
        ("trainer.logger=[console,tracking]", "trainer.logger", ("console", "wandb")),
        ("actor_rollout_ref.rollout.dtype=bf16", "actor_rollout_ref.rollout.dtype", "bfloat16"),
    ],
)
def test_alias_sets_the_key_with_one_warning(words, warnings, word, key, value):
    config = load_ppo([*words, word])
    assert get(config.model_dump(), key) == value
    assert len(warnings.messages) == 1
    assert "is a deprecated alias, which camshaft 1.0 removes; use" in warnings.messages[0]


def test_alias_changes_dependent_keys(words):
    config = load_ppo([*words, "actor_rollout_ref.model.external_libs=my_pkg"])
    assert config.critic.model.external_lib == "my_pkg"


def test_aliases_work_in_files(words, warnings, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "algorithm: {gemma: 0.5}\nactor_rollout_ref: {actor: {optim: {warmup_style: cosine}}}"
    )
    config = load_ppo(words, config_dir=str(tmp_path), config_name="mine")
    assert config.algorithm.gamma == 0.5
    assert config.actor_rollout_ref.actor.optim.lr_scheduler_type == "cosine"
    assert len(warnings.messages) == 2


def test_aliases_work_in_supervised_runs(sft_words, warnings):
    config = load_sft([*sft_words, "optim.warmup_style=constant", "optim.clip_grad=2.0"])
    assert (config.optim.lr_scheduler_type, config.grad_clip) == ("constant", 2.0)
    assert sum("is a deprecated alias" in message for message in warnings.messages) == 2


def test_alias_with_the_same_value_passes(words):
    config = load_ppo([*words, "algorithm.gemma=0.9", "algorithm.gamma=0.9"])
    assert config.algorithm.gamma == 0.9


@pytest.mark.parametrize("newer", ["0.8", "1.0"])  # another value, and the default given explicitly
def test_alias_that_contradicts_its_key_is_an_error(words, newer):
    with pytest.raises(ConfigError, match=r"algorithm\.gemma = 0\.9\n.*is an alias of algorithm\.gamma") as caught:
        load_ppo([*words, "algorithm.gemma=0.9", f"algorithm.gamma={newer}"])
    assert f"set to {newer}" in str(caught.value)


def test_alias_that_contradicts_its_key_in_a_dict_is_an_error():
    with pytest.raises(ConfigError, match=r"is an alias of algorithm\.gamma"):
        from_container({"algorithm": {"gemma": 0.9, "gamma": 1.0}}, PPOConfig)


def test_invalid_value_of_an_alias_is_reported_under_the_key(words):
    with pytest.raises(ConfigError, match=r"algorithm\.gamma = 7\n.*<= 1"):
        load_ppo([*words, "algorithm.gemma=7"])


GLOBAL = "actor_rollout_ref.actor.ppo_micro_batch_size"


def test_global_micro_batch_size_replaces_the_default_per_gpu(words, warnings):
    actor = load_ppo([*words, f"{GLOBAL}=32"]).actor_rollout_ref.actor
    assert (actor.ppo_micro_batch_size, actor.ppo_micro_batch_size_per_gpu) == (32, None)
    expected = f"config: '{GLOBAL}' is deprecated, and camshaft 1.0 removes it; use '{GLOBAL}_per_gpu'"
    assert [message for message in warnings.messages if "deprecated" in message] == [expected]


def test_micro_batch_size_per_gpu_overrides_the_global_size(words):
    actor = load_ppo([*words, f"{GLOBAL}=32", f"{GLOBAL}_per_gpu=4"]).actor_rollout_ref.actor
    assert actor.ppo_micro_batch_size_per_gpu == 4


def test_global_micro_batch_size_of_the_critic_sets_its_forward_passes(words):
    critic = load_ppo([*words, "critic.ppo_micro_batch_size=32"]).critic
    assert (critic.forward_micro_batch_size, critic.forward_micro_batch_size_per_gpu) == (32, None)
    critic = load_ppo([*words, "critic.ppo_micro_batch_size=32", "critic.forward_micro_batch_size_per_gpu=2"]).critic
    assert critic.forward_micro_batch_size_per_gpu == 2


def test_a_run_without_a_micro_batch_size_is_rejected(words):
    with pytest.raises(ConfigError, match=rf"{GLOBAL}_per_gpu = null\n.*sets no micro-batch size"):
        load_ppo([*words, f"{GLOBAL}_per_gpu=null", "actor_rollout_ref.actor.use_dynamic_bsz=false"])


def test_aliases_are_no_keys_and_point_to_keys():
    all_fields = {**fields(PPOConfig), **fields(SFTConfig), **fields(GenerateConfig)}
    assert all(key in all_fields and alias not in all_fields for alias, key in ALIASES.items())
    assert all(key in all_fields for key in VALUE_ALIASES)
