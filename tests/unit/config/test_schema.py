"""The schema and its defaults agree with the specification and the registries."""

import contextlib
import inspect
import subprocess
import sys
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from camshaft import algorithms
from camshaft.config import EvalConfig, GenerateConfig, PPOConfig, RMConfig, SFTConfig, load_ppo
from camshaft.config.auto.rules import RULES
from camshaft.config.defaults import raw_defaults
from camshaft.config.load import resolved_defaults, valid_defaults
from camshaft.config.schema.algorithm import ESTIMATORS
from camshaft.config.schema.fields import DifferingDefaults, KLPenalty, LossAggMode, accepts_auto, marks
from camshaft.config.schema.policy_loss import POLICY_LOSSES, PolicyLossConfig
from camshaft.config.tree import expand_keys, fields, flatten, get, leaf_fields, ordered_names, section_class

SCHEMAS = [PPOConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_tree_of_defaults_has_every_key(schema):
    leaves = leaf_fields(schema)
    assert flatten(raw_defaults(schema), leaves).keys() == leaves.keys()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_order_of_keys_names_keys_of_the_section(schema):
    sections = {schema, *filter(None, map(section_class, fields(schema).values()))}
    for section in sections:
        assert sorted(ordered_names(section)) == sorted(section.model_fields), section


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_has_a_description_of_one_line(schema):
    for key, field in fields(schema).items():
        assert field.description, key
        assert field.description.endswith("."), key
        assert "\n" not in field.description, key


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_has_its_default_at_its_field(schema):
    for key, field in leaf_fields(schema).items():
        assert not field.is_required(), key


@pytest.mark.parametrize("schema", SCHEMAS)
def test_only_enclosing_sections_change_a_default(schema):
    differing = {
        f"{place}.{key}"
        for place, field in fields(schema).items()
        for mark in marks(field, DifferingDefaults)
        for key in mark.values
    }
    defaults = flatten(raw_defaults(schema), leaf_fields(schema))
    assert {key for key, field in leaf_fields(schema).items() if defaults[key] != field.default} <= differing
    assert differing <= leaf_fields(schema).keys()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_defaults_are_valid(schema):
    schema.model_validate(valid_defaults(schema))


def test_config_is_immutable(words):
    config = load_ppo(words)
    with pytest.raises(ValidationError, match="frozen"):
        config.trainer.seed = 2


# Keys and defaults as the specification lists them. Omitted: `warmup_style` (an older alias; so is the reward
# model's `fsdp_config.min_num_params`, which all models have in `wrap_policy`),
# `trainer.logger` (its `tracking` needs a wandb account), `trainer.project_name`, `trainer.experiment_name`.
SPECIFIED = {
    "data.tokenizer": None,
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.val_batch_size": 1312,
    "data.return_raw_input_ids": False,
    "data.return_raw_chat": False,
    "data.truncation": "error",
    "data.prompt_id_key": None,
    "data.max_prompt_id_length": None,
    "actor_rollout_ref.hybrid_engine": True,
    "actor_rollout_ref.model.path": "~/models/deepseek-llm-7b-chat",
    "actor_rollout_ref.model.external_lib": None,
    "actor_rollout_ref.model.override_config": {},
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.strategy": "fsdp",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 64 // 8,  # 64 on the eight devices of the specification
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.entropy_coeff": 0.001,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.shuffle": True,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.0,
    "actor_rollout_ref.actor.optim.min_lr_ratio": None,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "actor_rollout_ref.actor.optim.total_training_steps": -1,
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params": 0,
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": None,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.grad_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.ref.fsdp_config.param_offload": False,
    "actor_rollout_ref.ref.fsdp_config.wrap_policy.min_num_params": 0,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 128 // 8,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_k": -1,
    "actor_rollout_ref.rollout.top_p": 1,
    "actor_rollout_ref.rollout.response_length": 512,
    "actor_rollout_ref.rollout.dtype": "bfloat16",
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.rollout.ignore_eos": False,
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.free_cache_engine": True,
    "actor_rollout_ref.rollout.load_format": "dummy_dtensor",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 8192,
    "actor_rollout_ref.rollout.max_num_seqs": 1024,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 128 // 8,
    "actor_rollout_ref.rollout.do_sample": True,
    "reward_model.enable": False,
    "reward_model.model.input_tokenizer": "~/models/deepseek-llm-7b-chat",
    "reward_model.model.path": "~/models/Anomy-RM-v0.1",
    "reward_model.model.external_lib": None,
    "reward_model.model.fsdp_config.wrap_policy.min_num_params": 0,
    "reward_model.model.fsdp_config.param_offload": False,
    "reward_model.micro_batch_size_per_gpu": 64 // 8,
    "reward_model.max_length": None,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.005,
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": 2,
    "trainer.critic_warmup": 0,
    "trainer.use_legacy_worker_impl": "auto",
}


DEVIATIONS = {
    "data.train_files": None,
    "data.val_files": None,
    "data.max_prompt_length": "auto",
    "data.train_batch_size": "auto",
    "actor_rollout_ref.model.path": None,
    "actor_rollout_ref.actor.strategy": "auto",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "auto",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "auto",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "auto",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "auto",
    "reward_model.micro_batch_size_per_gpu": "auto",
    "actor_rollout_ref.rollout.name": "auto",
    "actor_rollout_ref.rollout.dtype": "auto",
    "actor_rollout_ref.rollout.enforce_eager": "auto",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "reward_model.model.input_tokenizer": None,
    "trainer.n_gpus_per_node": "auto",
    "trainer.total_epochs": "auto",
    "trainer.save_freq": "auto",
    "trainer.test_freq": "auto",
}
"""Defaults that fit any machine and run length, where those of the specification need eight GPUs and certain files."""


def test_keys_and_defaults_match_the_specification():
    defaults = resolved_defaults(PPOConfig)
    actual = {key: get(defaults, key) for key in SPECIFIED}
    assert actual == SPECIFIED | DEVIATIONS


@pytest.mark.parametrize("key", [key for key in DEVIATIONS if key not in ("data.val_files", "trainer.n_gpus_per_node")])
def test_specified_defaults_remain_valid(key):
    values = dict(valid_defaults(PPOConfig))
    tree = expand_keys(flatten(values, leaf_fields(PPOConfig)) | {key: SPECIFIED[key]}, leaf_fields(PPOConfig))
    PPOConfig.model_validate(tree)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_keys_that_accept_auto_have_a_rule(schema):
    marked = {key for key, field in leaf_fields(schema).items() if accepts_auto(field)}
    scheduled = {"trainer.save_freq", "trainer.test_freq"} & leaf_fields(schema).keys()
    assert RULES[schema].keys() == marked | scheduled


def test_config_choices_match_the_algorithm_registries():
    assert set(ESTIMATORS) == set(algorithms.ESTIMATORS)
    assert set(POLICY_LOSSES) == set(algorithms.POLICY_LOSSES)
    assert set(get_args(LossAggMode)) == set(algorithms.AGGREGATIONS)
    assert set(get_args(KLPenalty)) == {*algorithms.KL_PENALTIES, "full"}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_has_the_parameters_that_the_config_declares(name):
    common = {*inspect.signature(algorithms.policy_loss).parameters}
    columns = {"clip_cov": {"selected"}, "kl_cov": {"penalties"}}  # of the batch, not of the config
    parameters = PolicyLossConfig(loss_mode=name).parameters().keys() | columns.get(name, set())
    assert {*inspect.signature(algorithms.POLICY_LOSSES[name]).parameters} - common == parameters


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_reads_the_inputs_that_the_config_declares(name):
    rewards = torch.tensor([[0.0, 9.0, 1.0], [3.0, 9.0, 0.5], [1.0, 9.0, 2.0]])
    mask = torch.tensor([[True, False, True]]).expand(3, 3)  # two turns of an episode
    options = {"values": rewards / 2, "groups": torch.tensor([0, 0, 1]), "baselines": rewards[:, 0]}
    options |= {"old_log_probs": -rewards - 0.5, "sum_pi_squared": torch.full((3, 3), 0.75)}
    options["reward_parts"] = torch.tensor([[1.0, 0.0], [2.0, 4.0], [3.0, 2.0]])
    declared, estimator = ESTIMATORS[name], algorithms.ESTIMATORS[name]
    for missing in options:
        inputs = algorithms.AdvantageInputs(rewards, mask, **{key: options[key] for key in options if key != missing})
        is_read = getattr(declared, "probabilities" if missing in ("old_log_probs", "sum_pi_squared") else missing)
        with pytest.raises(ValueError, match=f"`{missing}`") if is_read else contextlib.nullcontext():
            estimator(inputs, algorithms.AdvantageOptions())
    inputs = algorithms.AdvantageInputs(rewards, mask, **options)
    results = {
        key: estimator(inputs, algorithms.AdvantageOptions(**changed))[0]
        for key, changed in {
            "gamma": {"gamma": 0.5},
            "lam": {"lam": 0.5},
            "norm_adv_by_std_in_grpo": {"norm_by_std": False},
            "gdpo_reward_weights": {"part_weights": (1.0, -3.0)},
        }.items()
    }
    default = estimator(inputs, algorithms.AdvantageOptions())[0]
    assert {key for key, result in results.items() if not torch.equal(result, default)} == {
        key
        for key in declared.keys
        if key != "gdpo_reward_keys"  # selects the columns of `reward_parts`
    }


def test_loading_a_config_does_not_import_torch(words):
    code = (
        "import sys, camshaft.config as c\n"
        "assert 'hydra' not in sys.modules, 'hydra'\n"
        f"c.load_ppo({words!r})\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert 'transformers' not in sys.modules, 'transformers'\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
