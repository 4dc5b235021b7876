"""Unimplemented values are rejected with a fix."""

import pytest

from camshaft.config import GenerateConfig, PPOConfig, SFTConfig, load_ppo, load_sft
from camshaft.config.load import NOT_IMPLEMENTED
from camshaft.config.tree import leaf_fields
from camshaft.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        (f"{ROLLOUT}.multi_turn.history=template", "history=append"),
        ("trainer.default_local_dir=s3://bucket/run", "accept URLs"),
        ("custom_reward_function.path=s3://bucket/reward.py", "accept URLs"),
    ],
)
def test_unimplemented_value_is_rejected_with_a_fix(words, word, instead):
    with pytest.raises(ConfigError) as caught:
        load_ppo([*words, word])
    text = str(caught.value)
    assert "1 error in the config" in text
    assert word.partition("=")[0] in text
    assert "not implemented" in text or "must be a local path" in text
    assert instead in text


@pytest.mark.parametrize(
    "word",
    [
        f"{ACTOR}.strategy=support.own_backends:OwnEngine",
        f"{ACTOR}.strategy=torchtitan",
        f"{ROLLOUT}.name=support.own_backends:OwnRollout",
        "trainer.logger=[console,my_pkg.trackers:Mine]",
        "trainer.logger=[console,wandb,tensorboard,mlflow,trackio]",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.dtype=bfloat16",
        "actor_rollout_ref.ref.fsdp_config.model_dtype=bfloat16",
        f"{ACTOR}.fsdp_config.model_dtype=float64",
        f"{ROLLOUT}.load_format=dummy_hf",
        f"{ROLLOUT}.gpu_memory_utilization=0.9",
        f"{ROLLOUT}.enforce_eager=false",
        "reward_model.micro_batch_size=3",
        "data.return_raw_input_ids=true",
        "data.return_raw_chat=true",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.default_hdfs_dir=null",
        "trainer.default_hdfs_dir=hdfs://node/run",
        "trainer.default_hdfs_dir=s3://bucket/run",
        "data.train_files=hdfs://node/train.parquet",
        "data.val_files=[s3://bucket/val.parquet]",
        "data.tokenizer=s3://bucket/model",
        "actor_rollout_ref.model.path=hdfs://node/model",
        "critic.model.path=hdfs://node/model",
    ],
)
def test_implemented_and_third_party_values_pass(words, word):
    load_ppo([*words, word])


@pytest.mark.parametrize("section", [f"{ACTOR}.fsdp_config", "critic.model.fsdp_config"])
def test_pure_bfloat16_training_suggests_mixed_precision(words, section):
    with pytest.raises(ConfigError) as caught:
        load_ppo([*words, f"{ACTOR}.strategy=fsdp", f"{section}.model_dtype=bfloat16"])
    text = str(caught.value)
    assert "1 error in the config" in text
    assert "Keep float32 weights" in text
    assert f"Set {section}.model_dtype=float32 {section}.mixed_precision.param_dtype=bfloat16" in text
    load_ppo([*words, f"{ACTOR}.strategy=fsdp", f"{section}.mixed_precision.param_dtype=bfloat16"])


def test_problem_with_one_cause_is_reported_once(words):
    sections = (f"{ACTOR}.fsdp_config", "critic.model.fsdp_config")
    with pytest.raises(ConfigError) as caught:
        load_ppo([*words, f"{ACTOR}.strategy=fsdp", *(f"{section}.model_dtype=bfloat16" for section in sections)])
    text = str(caught.value)
    assert "1 error in the config" in text
    assert "The same applies to critic.model.fsdp_config.model_dtype" in text


def test_supervised_runs_reject_the_same_values(sft_words):
    with pytest.raises(ConfigError) as caught:
        load_sft([*sft_words, "strategy=fsdp", "fsdp_config.model_dtype=bfloat16"])
    text = str(caught.value)
    assert "1 error in the config" in text
    assert "Set fsdp_config.model_dtype=float32 fsdp_config.mixed_precision.param_dtype=bfloat16." in text


def test_bfloat16_weights_are_accepted_under_an_adapter(words, sft_words):
    keys = [f"{ACTOR}.fsdp_config.model_dtype=bfloat16", "critic.model.fsdp_config.model_dtype=bfloat16"]
    both = ["actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=4"]
    config = load_ppo([*words, *keys, *both, "algorithm.adv_estimator=gae"])
    assert config.critic.model.fsdp_config.model_dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"critic\.model\.fsdp_config\.model_dtype = bfloat16"):
        load_ppo([*words, *keys, both[0]])
    assert load_sft([*sft_words, "fsdp_config.model_dtype=bfloat16", "lora=4"]).fsdp_config.model_dtype == "bfloat16"


def test_an_engine_without_frozen_bfloat16_weights_names_the_pair(words):
    keys = [f"{ACTOR}.fsdp_config.model_dtype=bfloat16", "actor_rollout_ref.model.lora_rank=4"]
    with pytest.raises(ConfigError) as caught:
        load_ppo([*words, *keys, f"{ACTOR}.strategy=fsdp1"])
    assert "strategy=fsdp1 does not support actor_rollout_ref.model.lora_rank=4 on weights of this dtype" in str(
        caught.value
    )


def test_unimplemented_keys_exist_and_are_unique():
    all_fields = {**leaf_fields(PPOConfig), **leaf_fields(SFTConfig), **leaf_fields(GenerateConfig)}
    listed = [key for entry in NOT_IMPLEMENTED for key in entry.keys]
    assert [key for key in listed if key not in all_fields] == []
    assert len(listed) == len(set(listed))
