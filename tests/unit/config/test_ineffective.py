"""Keys that the user set and that nothing reads in a run are reported, and no others.

The oracle of the two tests at the end is outside the table: the config of every engine and rollout that the run has,
and the metrics and weights of a training step.
"""

import logging
import runpy
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from spec.fields import ACTOR, CRITIC, FIELDS, MODEL, REF, REWARD, ROLLOUT
from spec.test_fields import PARTS, filled
from support.ppo_runs import run_ppo

from camshaft.config import (
    GenerateConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    load_generate,
    load_ppo,
    load_rm,
    load_sft,
)
from camshaft.config.checks.ineffective import (
    RULES,
    field_rules,
    find_notices,
)
from camshaft.config.composition import compose_jobs, overridden_keys
from camshaft.config.defaults import raw_defaults
from camshaft.config.load import choose_automatic, from_container, resolve
from camshaft.config.schema.fields import Section
from camshaft.config.schema.model import OPTIMIZERS_WITHOUT_BETAS
from camshaft.config.tree import leaf_fields, merge
from camshaft.errors import ConfigError
from camshaft.machine import Machine

Case = tuple[str, list[str], list[str]]
"""A setting, the settings with which nothing reads its key, and those with which something does."""

FILTER = "algorithm.filter_groups"
CORRECTION = "algorithm.rollout_correction"
GROUPS = [f"{ROLLOUT}.n=2"]
GRPO = ["algorithm.adv_estimator=grpo", *GROUPS]
GDPO_KEYS = ["algorithm.gdpo_reward_keys=[score]"]
GDPO = [word.replace("=grpo", "=gdpo") for word in GRPO]
KL_LOSS = [f"{ACTOR}.use_kl_loss=true"]
NO_VALIDATION = ["trainer.val_before_train=false", "trainer.test_freq=-1"]
ON_GPU = ["trainer.device=cuda"]


def model_cases(section: str, engine: str) -> list[Case]:
    fsdp = f"{ACTOR}.fsdp_config" if section.startswith("actor") else f"{section}.fsdp_config"
    return [
        (f"{section}.use_remove_padding=false", [], []),
        (f"{section}.gradient_checkpointing_mode=selective", [], [f"{section}.enable_gradient_checkpointing=true"]),
        (f"{section}.lora_alpha=8", [], [f"{section}.lora_rank=4"]),
        (f"{section}.target_modules=[q_proj]", [], [f"{section}.lora_rank=4"]),
        (f"{section}.exclude_modules=[v_proj]", [], [f"{section}.lora_rank=4"]),
        (f"{section}.enable_activation_offload=true", [f"{engine}=fsdp"], [f"{engine}=fsdp", *ON_GPU]),
        (f"{section}.use_prefix_grouper=true", [*ON_GPU, f"{fsdp}.mixed_precision.param_dtype=null"], ON_GPU),
        (f"{section}.use_prefix_grouper=true", [f"{engine}=megatron"], [f"{engine}=fsdp"]),
    ]


def optim_cases(section: str) -> list[Case]:
    constant, cosine, linear = (f"{section}.lr_scheduler_type={name}" for name in ("constant", "cosine", "linear"))
    return [
        (f"{section}.min_lr_ratio=0.1", [constant], [cosine]),
        (f"{section}.num_cycles=2", [linear], [cosine]),
        (f"{section}.lr_warmup_steps_ratio=0.5", [f"{section}.lr_warmup_steps=3"], []),
        (f"{section}.total_training_steps=9", [constant, f"{section}.lr_warmup_steps=3"], [cosine]),
        (f"{section}.total_training_steps=9", [constant, f"{section}.lr_warmup_steps_ratio=0"],
         [constant, f"{section}.lr_warmup_steps_ratio=0.5"]),
        (f"{section}.betas=[0.5,0.5]", [f"{section}.optimizer=SGD"], []),
        *((f"{section}.{name}={value}", [f"+{section}.override_optimizer_config.{name}={value}"], [])
          for name, value in {"lr": 0.5, "betas": "[0.5,0.5]", "weight_decay": 0.5}.items()),
    ]  # fmt: skip


def sharding_cases(section: str, engine: str, names: tuple[str, ...]) -> list[Case]:
    fsdp = [f"{engine}=fsdp"]
    return [
        *((f"{section}.{name}=true", fsdp, [*fsdp, *ON_GPU]) for name in names),
        (f"{section}.wrap_policy.transformer_layer_cls_to_wrap=Layer",
         [*fsdp, f"{section}.wrap_policy.min_num_params=9"], fsdp),
    ]  # fmt: skip


def batch_cases(dynamic: str, size: str, tokens: str, overall: str | None = None) -> list[Case]:
    on = [f"{dynamic}=true"]
    cases: list[Case] = [(f"{size}=2", on, []), (f"{tokens}=20000", [f"{dynamic}=false"], on)]
    return cases if overall is None else [*cases, (f"{overall}=2", on, []), (f"{overall}=2", [f"{size}=2"], [])]


def rollout_cases(section: str) -> list[Case]:
    name, server = f"{section}.name", f"+{section}.engine_kwargs.vllm_server_base_url=http://127.0.0.1:8000"
    vllm = [f"{name}=vllm", f"{section}.tensor_model_parallel_size=1"]
    in_process = [f"{name}=process", f"+{section}.engine_kwargs.rollout=server"]
    turns = f"{section}.multi_turn"
    played, solved = [f"{turns}.environment=my_package:Game"], [f"{turns}.agent=my_package:solve"]
    called = [f"{turns}.tools=my_package:add"]
    return [
        (f"{turns}.num_workers=2", [], played),
        (f"{turns}.timeout=2", [], played),
        (f"{turns}.num_workers=2", solved, played),
        (f"{turns}.max_concurrency=2", played, solved),
        (f"{turns}.environment_kwargs={{level:2}}", called, played),
        (f"{turns}.environment_kwargs={{level:2}}", solved, [*played, *called]),
        (f"{turns}.max_tool_response_length=9", solved, called),
        (f"{turns}.tool_response_truncate_side=left", [*solved, f"{turns}.max_tool_response_length=9"],
         [*called, f"{turns}.max_tool_response_length=9"]),
        (f"{turns}.tool_response_truncate_side=left", played, [*played, f"{turns}.max_tool_response_length=9"]),
        (f"{section}.tensor_model_parallel_size=2", [f"{name}=torch"], [f"{name}=sglang"]),
        (f"{section}.gpu_memory_utilization=0.4", [f"{name}=torch"], [f"{name}=torch", *ON_GPU]),
        (f"{section}.gpu_memory_utilization=0.4", [f"{name}=sglang"], [f"{name}=sglang", *ON_GPU]),
        (f"{section}.gpu_memory_utilization=0.4", [f"{name}=process"], [*vllm, *ON_GPU]),
        (f"{section}.gpu_memory_utilization=0.4", vllm, [*vllm, *ON_GPU]),
        (f"{section}.gpu_memory_utilization=0.4", [f"{name}=server", vllm[1]], [f"{name}=server", vllm[1], *ON_GPU]),
        (f"{section}.enforce_eager=false", [f"{name}=hf"], vllm),
        (f"{section}.enforce_eager=false", [f"{name}=torch"], [f"{name}=torch", *ON_GPU]),
        (f"{section}.enforce_eager=false", [f"{name}=process"], [f"{name}=process", *ON_GPU]),
        (f"{section}.load_format=auto", [f"{name}=torch"], vllm),
        (f"{section}.enable_prefix_caching=false", [f"{name}=hf"], vllm),
        (f"{section}.update_weights_bucket_megabytes=8", [f"{name}=torch"], [f"{name}=process"]),
        (f"{section}.free_cache_engine=false", [f"{name}=hf"], [f"{name}=torch"]),
        *((f"{section}.{leaf}", [f"{name}=server", server], [f"{name}=server", vllm[1], *ON_GPU])
          for leaf in ("gpu_memory_utilization=0.4", "enforce_eager=false", "load_format=auto",
                       "enable_prefix_caching=false", "max_num_batched_tokens=99")),
        (f"{section}.tensor_model_parallel_size=2", [f"{name}=server", server], [f"{name}=sglang"]),
        (f"{section}.enable_prefix_caching=false", [*in_process, server], in_process),
        (f"{section}.top_k=5", [f"{section}.do_sample=false"], []),
        (f"{section}.top_p=0.5", [f"{section}.do_sample=false"], []),
        (f"{section}.min_p=0.1", [f"{section}.do_sample=false"], []),
    ]  # fmt: skip


VALIDATED = ["trainer.test_freq=1", "data.val_files={folder}/val.parquet"]
CONTROLLER_CASES: list[Case] = [
    ("trainer.cpus_per_rank=2", [], ["trainer.controller=ray"]),
    ("+ray_kwargs.ray_init.num_cpus=2", [], ["trainer.controller=ray"]),
]
OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload", "offload_policy")
FORWARD_OFFLOADS = ("param_offload", "offload_policy")
SCORED = [f"{REWARD}.enable=true", f"{REWARD}.model.path={{folder}}/model"]
ONE_STEP = [f"{ACTOR}.ppo_mini_batch_size=1024"]

PPO_CASES: list[Case] = [
    ("data.seed=3", ["data.shuffle=false"], []),
    ("data.truncation=left", ["data.filter_overlong_prompts=true"], []),
    ("critic.optim.lr=0.5", GRPO, []),
    ("critic.ppo_epochs=2", GRPO, []),
    ("trainer.max_critic_ckpt_to_keep=2", GRPO, []),
    (f"{REF}.log_prob_micro_batch_size_per_gpu=2", [], KL_LOSS),
    (f"{REF}.log_prob_micro_batch_size_per_gpu=2", [*KL_LOSS, f"{MODEL}.lora_rank=4"], KL_LOSS),
    (f"{REWARD}.micro_batch_size_per_gpu=2", [], SCORED),
    (f"{REWARD}.weight=2", [*SCORED, "custom_reward_function.name=null"], SCORED),
    *((f"{REWARD}.overlong_buffer.{setting}", [], [f"{REWARD}.overlong_buffer.enable=true",
                                                   f"{REWARD}.overlong_buffer.len=7"])
      for setting in ("len=8", "penalty_factor=2", "log=true")),
    ("custom_reward_function.timeout=3", [*SCORED, "custom_reward_function.name=null"], []),
    *model_cases(MODEL, f"{ACTOR}.strategy"),
    *model_cases(f"{CRITIC}.model", "critic.strategy"),
    *optim_cases(f"{ACTOR}.optim"),
    *optim_cases("critic.optim"),
    *sharding_cases(f"{ACTOR}.fsdp_config", f"{ACTOR}.strategy", OFFLOADS),
    *sharding_cases("critic.model.fsdp_config", "critic.strategy", OFFLOADS),
    *((case, [*KL_LOSS, *dead], [*KL_LOSS, *live])
      for case, dead, live in sharding_cases(f"{REF}.fsdp_config", f"{ACTOR}.strategy", FORWARD_OFFLOADS)),
    *((case, [*SCORED, *dead], [*SCORED, *live])
      for case, dead, live in sharding_cases(f"{REWARD}.model.fsdp_config", f"{REWARD}.strategy", FORWARD_OFFLOADS)),
    *batch_cases(f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_micro_batch_size_per_gpu",
                 f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_micro_batch_size"),
    *batch_cases("critic.use_dynamic_bsz", "critic.ppo_micro_batch_size_per_gpu",
                 "critic.ppo_max_token_len_per_gpu", "critic.ppo_micro_batch_size"),
    *batch_cases("critic.use_dynamic_bsz", "critic.forward_micro_batch_size_per_gpu",
                 "critic.forward_max_token_len_per_gpu", "critic.forward_micro_batch_size"),
    *batch_cases(f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
                 f"{ROLLOUT}.log_prob_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size"),
    *((case, [*KL_LOSS, *dead], [*KL_LOSS, *live]) for case, dead, live in batch_cases(
        f"{REF}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_micro_batch_size_per_gpu",
        f"{REF}.log_prob_max_token_len_per_gpu", f"{REF}.log_prob_micro_batch_size")),
    *((case, [*SCORED, *dead], [*SCORED, *live]) for case, dead, live in batch_cases(
        f"{REWARD}.use_dynamic_bsz", f"{REWARD}.micro_batch_size_per_gpu",
        f"{REWARD}.forward_max_token_len_per_gpu", f"{REWARD}.micro_batch_size")),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2", ONE_STEP, [*ONE_STEP, "trainer.critic_warmup=1"]),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2", [f"{CORRECTION}.bypass_mode=true"], []),
    (f"{ACTOR}.clip_ratio=0.3", [f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.2"], []),
    (f"{ACTOR}.clip_ratio=0.3", ONE_STEP, []),
    (f"{ACTOR}.clip_ratio_c=4", [f"{ACTOR}.policy_loss.loss_mode=cispo"], []),
    (f"{ACTOR}.clip_ratio_high=0.3", [f"{ACTOR}.policy_loss.loss_mode=gpg"], []),
    (f"{ACTOR}.policy_loss.tau_pos=2", [], [f"{ACTOR}.policy_loss.loss_mode=sapo"]),
    (f"{ACTOR}.policy_loss.tau_neg=2", [*ONE_STEP, f"{ACTOR}.policy_loss.loss_mode=sapo"],
     [f"{ACTOR}.policy_loss.loss_mode=sapo"]),
    (f"{ACTOR}.policy_loss.dro_beta=1", [], [f"{ACTOR}.policy_loss.loss_mode=dro"]),
    (f"{ACTOR}.policy_loss.clip_cov_ub=9", [], [f"{ACTOR}.policy_loss.loss_mode=clip_cov"]),
    (f"{ACTOR}.policy_loss.clip_cov_lb=0.5", [], [f"{ACTOR}.policy_loss.loss_mode=clip_cov"]),
    (f"{ACTOR}.policy_loss.clip_cov_ratio=0.1", [], [f"{ACTOR}.policy_loss.loss_mode=clip_cov"]),
    (f"{ACTOR}.policy_loss.ppo_kl_coef=2", [], [f"{ACTOR}.policy_loss.loss_mode=kl_cov"]),
    (f"{ACTOR}.policy_loss.kl_cov_ratio=0.1", [], [f"{ACTOR}.policy_loss.loss_mode=kl_cov"]),
    (f"{ACTOR}.entropy_coeff_max=0.5", [], [f"{ACTOR}.entropy_target=0.3"]),
    (f"{ACTOR}.kl_loss_coef=0.1", [], KL_LOSS),
    (f"{ACTOR}.kl_loss_type=mse", [], KL_LOSS),
    *rollout_cases(ROLLOUT),
    *(("trainer.worker_timeouts.update=9", [], live) for live in (
        ["trainer.controller=ray"], [f"{ROLLOUT}.name=process"], ["trainer.default_hdfs_dir={folder}/copies"],
        [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.checkpoint.async_save=true"])),
    ("algorithm.gamma=0.9", GRPO, ["algorithm.adv_estimator=reinforce_plus_plus"]),
    ("algorithm.lam=0.9", ["algorithm.adv_estimator=reinforce_plus_plus"], []),
    ("algorithm.norm_adv_by_std_in_grpo=false", [], GRPO),
    ("algorithm.gdpo_reward_keys=[score]", GRPO, GDPO),
    ("algorithm.gdpo_reward_weights=[2]", [*GRPO, *GDPO_KEYS], [*GDPO, *GDPO_KEYS]),
    ("algorithm.kl_penalty=mse", [], ["algorithm.use_kl_in_reward=true"]),
    ("algorithm.kl_ctrl.kl_coef=0.1", [], ["algorithm.use_kl_in_reward=true"]),
    ("algorithm.kl_ctrl.horizon=9", ["algorithm.use_kl_in_reward=true"],
     ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]),
    (f"{FILTER}.metric=acc", GRPO, [*GRPO, f"{FILTER}.enable=true"]),
    (f"{CORRECTION}.rollout_is_threshold=3", [], [f"{CORRECTION}.rollout_is=token"]),
    (f"{CORRECTION}.rollout_is_batch_normalize=true", [], [f"{CORRECTION}.rollout_is=token"]),
    (f"{CORRECTION}.rollout_is=token", [f"{CORRECTION}.bypass_mode=true"],
     [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce"]),
    (f"{CORRECTION}.loss_type=reinforce", [], [f"{CORRECTION}.bypass_mode=true"]),
    (f"{ACTOR}.policy_loss.loss_mode=cispo", [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce"],
     [f"{CORRECTION}.bypass_mode=true"]),
    (f"{ACTOR}.clip_ratio_high=0.3", [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce"], []),
    ("data.val_batch_size=3", NO_VALIDATION, []),
    (f"{ROLLOUT}.resource_pool=fast", [],
     ["actor_rollout_ref.hybrid_engine=false", "+trainer.resource_pools.fast.n_gpus_per_node=1"]),
    (f"{ROLLOUT}.free_cache_engine=true", ["actor_rollout_ref.hybrid_engine=false"], []),
    (f"{ROLLOUT}.val_kwargs.top_k=3", NO_VALIDATION,
     [f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.temperature=1"]),
    (f"{ROLLOUT}.val_kwargs.temperature=0.5", [], [f"{ROLLOUT}.val_kwargs.do_sample=true"]),
    ("trainer.best_metric_mode=min", [], ["trainer.best_metric=val/loss"]),
    *CONTROLLER_CASES,
]  # fmt: skip

SUPERVISED_CASES: list[Case] = [
    ("trainer.worker_timeouts.generate=9", [], []),
    ("trainer.worker_timeouts.update=9", [], ["trainer.controller=ray"]),
    ("data.seed=3", ["data.shuffle=false"], []),
    ("data.val_files={folder}/val.parquet", ["trainer.test_freq=-1"], ["trainer.test_freq=1"]),
    ("trainer.best_metric_mode=max", [], [*VALIDATED, "trainer.best_metric=val/loss"]),
    *batch_cases("data.use_dynamic_bsz", "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"),
    *model_cases("model", "strategy")[:-2],
    *optim_cases("optim"),
    *sharding_cases("fsdp_config", "strategy", OFFLOADS),
    *CONTROLLER_CASES,
]

GENERATE_CASES: list[Case] = [
    ("trainer.worker_timeouts.update=9", [], []),
    ("trainer.worker_timeouts.save=9", [], []),
    ("trainer.worker_timeouts.generate=9", [], ["trainer.controller=ray"]),
    ("data.truncation=left", ["data.filter_overlong_prompts=true"], []),
    *rollout_cases("rollout"),
    ("custom_reward_function.timeout=3", [], ["custom_reward_function.name=auto"]),
    ("data.reward_fn_key=source", [], ["custom_reward_function.name=auto"]),
    *CONTROLLER_CASES,
]

CASES: list[tuple[str, Case]] = [
    *(("ppo", case) for case in PPO_CASES),
    *(("sft", case) for case in SUPERVISED_CASES),
    *(("rm", case) for case in SUPERVISED_CASES[:3]),
    *(("generate", case) for case in GENERATE_CASES),
]


class Commands:
    """Minimal settings of each command, whose notices `messages` returns."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture):
        self.folder, self.caplog = folder, caplog
        data, model = [f"data.train_files={folder}/train.parquet"], f"{folder}/model"
        supervised = [*data, f"model.path={model}", "strategy=reference", "trainer.device=cpu", "data.val_files=null"]
        generate = [f"data.path={folder}/train.parquet", f"data.output_path={folder}/out.parquet", "trainer.device=cpu"]
        self.commands: dict[str, tuple[Callable[[list[str]], Any], list[str]]] = {
            "sft": (load_sft, supervised),
            "rm": (load_rm, supervised),
            "generate": (load_generate, [*generate, f"model.path={model}"]),
        }

    def messages(self, command: str, settings: list[str]) -> list[str]:
        load, base = self.commands[command]
        self.caplog.clear()
        with self.caplog.at_level(logging.WARNING, "camshaft.config"):
            load([*base, *(setting.replace("{folder}", str(self.folder)) for setting in settings)])
        return list(self.caplog.messages)


@pytest.fixture
def commands(words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Commands:
    commands = Commands(tmp_path, caplog)
    commands.commands["ppo"] = (load_ppo, words)
    return commands


def test_usual_settings_give_no_notice(commands: Commands) -> None:
    assert [commands.messages(command, []) for command in commands.commands] == [[]] * 4


@pytest.mark.parametrize(("command", "case"), CASES, ids=lambda value: value if isinstance(value, str) else value[0])
def test_key_that_nothing_reads_is_reported(command: str, case: Case, commands: Commands) -> None:
    setting, dead, live = case
    key = setting.lstrip("+").partition("=")[0].removesuffix(".num_cpus")
    reported = [message for message in commands.messages(command, [setting, *dead]) if f"{key}=" in message]
    assert len(reported) == 1
    assert reported[0].index(f"{key}=") < reported[0].index("no effect")
    always = key.endswith("use_remove_padding") or ("worker_timeouts" in key and not live)
    if not always:
        messages = commands.messages(command, [setting, *live])
        assert not [message for message in messages if f"{key}=" in message.partition("no effect")[0]]


def test_every_rule_has_a_case() -> None:
    cases = {PPOConfig: PPO_CASES, SFTConfig: SUPERVISED_CASES, GenerateConfig: GENERATE_CASES}
    for schema, listed in cases.items():
        keys = {setting.lstrip("+").partition("=")[0] for setting, _, _ in listed}
        rules = (*RULES[schema], *field_rules(schema))
        assert [rule.keys for rule in rules if not any(rule.covers(key) for key in keys)] == []


def test_rules_name_keys_of_their_command() -> None:
    for schema, rules in RULES.items():
        for rule in (*rules, *field_rules(schema)):
            for name in (*rule.keys, *rule.exempt):
                assert any(key == name or key.startswith(f"{name}.") for key in leaf_fields(schema)), (schema, name)


@pytest.fixture
def without_critic(commands: Commands) -> Commands:
    load, words = commands.commands["ppo"]
    commands.commands["ppo"] = (load, [*(word for word in words if "critic" not in word), *GRPO])
    return commands


def test_one_notice_lists_all_keys_with_the_same_cause(without_critic: Commands) -> None:
    settings = ["critic.optim.lr=0.5", "critic.ppo_epochs=2", "critic.grad_clip=3"]
    assert without_critic.messages("ppo", settings) == [
        "config: critic.grad_clip=3.0, critic.ppo_epochs=2, critic.optim.lr=0.5 have no effect with "
        "algorithm.adv_estimator=grpo critic.enable=null, because the run has no critic; set "
        "algorithm.adv_estimator=gae, or omit the key"
    ]


@pytest.mark.parametrize(
    "setting",
    [
        "critic.enable=null",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ACTOR}.fsdp_config.param_offload=false",
        f"{MODEL}.use_remove_padding=true",
        "trainer.use_legacy_worker_impl=auto",
        "trainer.use_legacy_worker_impl=disable",
    ],
)
def test_setting_that_describes_the_run_is_not_reported(setting: str, without_critic: Commands) -> None:
    assert without_critic.messages("ppo", [setting]) == []


def test_key_is_read_if_a_key_that_refers_to_it_is_read(commands: Commands) -> None:
    unread = [f"{ACTOR}.ppo_max_token_len_per_gpu=20000", f"{ACTOR}.use_dynamic_bsz=false"]
    assert len(commands.messages("ppo", unread)) == 1
    assert commands.messages("ppo", [*unread, f"{ROLLOUT}.log_prob_use_dynamic_bsz=true"]) == []


def test_a_notice_hides_secrets(commands: Commands) -> None:
    secret = "+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY=hunter2"
    (message,) = commands.messages("ppo", [secret])
    assert "ray_kwargs.ray_init" in message
    assert "hunter2" not in message


def test_keys_of_a_custom_role_are_not_reported(commands: Commands) -> None:
    settings = [f"{ACTOR}.kl_loss_coef=0.1", "algorithm.kl_penalty=mse"]
    assert len(commands.messages("ppo", settings)) == 2
    custom = "actor_rollout_ref.worker_cls=support.own_roles:OwnActor"
    (message,) = commands.messages("ppo", [*settings, custom])
    assert "algorithm.kl_penalty" in message


def test_keys_of_a_config_file_are_reported(words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nalgorithm: {kl_ctrl: {kl_coef: 0.25, horizon: 10000}}\n"
    )
    with caplog.at_level(logging.WARNING, "camshaft.config"):
        load_ppo(words, config_dir=str(tmp_path), config_name="mine")
    (message,) = caplog.messages
    assert message.startswith("config: algorithm.kl_ctrl.kl_coef=0.25 has no effect with algorithm.use_kl_in_reward")


def test_optimizers_without_betas_match_torch() -> None:
    import inspect

    for name in OPTIMIZERS_WITHOUT_BETAS:
        assert "betas" not in inspect.signature(getattr(torch.optim, name)).parameters
    adam = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")
    assert all("betas" in inspect.signature(getattr(torch.optim, name)).parameters for name in adam)


# -- the table against the configs of the engines -------------------------------------------------

BASES: dict[str, dict[str, Any]] = {
    "ppo without KL": {},
    "grpo": {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2},
    "KL loss": {f"{ACTOR}.use_kl_loss": True},
    "LoRA with KL loss": {f"{ACTOR}.use_kl_loss": True, f"{MODEL}.lora_rank": 4},
    "one step": {f"{ACTOR}.ppo_mini_batch_size": 1024},
    "dynamic batches": {f"{ACTOR}.use_dynamic_bsz": True},
    "bypass": {"algorithm.rollout_correction.bypass_mode": True},
    "reward model": {"reward_model.enable": True},
}
INSIDE_ENGINE = ("gradient_checkpointing_mode", "min_lr_ratio", "num_cycles", "optim.total_training_steps")
"""Keys whose field does not matter because of another field of the same engine."""


def run_config(folder: Path, settings: Mapping[str, Any]) -> PPOConfig:
    base = {
        "data.train_files": f"{folder}/train.parquet",
        "data.val_files": f"{folder}/val.parquet",
        f"{MODEL}.path": f"{folder}/model",
        "critic.model.path": f"{folder}/model",
        "reward_model.model.path": f"{folder}/model",
        "trainer.n_gpus_per_node": 4,
        "trainer.device": "cuda",
        f"{ROLLOUT}.name": "server",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ROLLOUT}.enforce_eager": True,
        **{
            f"{section}.fsdp_config.mixed_precision.param_dtype": None
            for section in ("actor_rollout_ref.actor", "critic.model")
        },
    }
    return from_container(base | dict(settings), PPOConfig)


def parts(config: PPOConfig) -> dict[str, Any]:
    """Return the configs of the engines and of the rollout that the run has."""
    exists = {
        "ref": config.kl_plan().needs_model,
        "critic": config.needs_critic(),
        "reward": config.reward_model.enable,
    }
    return {name: build(config) for name, build in PARTS.items() if exists.get(name, True)}


@pytest.mark.parametrize(
    "base",
    [base if base == "one step" else pytest.param(base, marks=pytest.mark.slow) for base in BASES],
)
def test_keys_of_engines_are_reported_if_they_change_no_engine(base: str, words: list[str], tmp_path: Path) -> None:
    """Compare the notices with the configs of all engines, which are derived without the table.

    A notice is wrong if the key changes a config, and missing if it changes none. On a GPU and with a server, every
    field of these configs is read.
    """
    for name in ("other", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    wrong = []
    for key, field in FIELDS.items():
        if (
            field.others
            or key == "trainer.device"
            or key.endswith((*INSIDE_ENGINE, "engine_kwargs"))
            or "val_kwargs" in key
        ):
            continue
        settings = {**BASES[base], key: filled(field.typed, tmp_path)}
        others = {name: value for name, value in BASES[base].items() if name != key}
        try:
            config, without = run_config(tmp_path, settings), run_config(tmp_path, others)
        except ConfigError:  # other tests cover combinations that are errors
            continue
        if bool(list(find_notices(config, raw_defaults(PPOConfig), {key}))) == (parts(config) != parts(without)):
            wrong.append(key)
    assert wrong == []


# -- the table against a training step ------------------------------------------------------------

UNREAD = {
    "algorithm.kl_penalty": "mse",
    "algorithm.kl_ctrl.kl_coef": 0.5,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.lam": 0.5,
    "algorithm.gamma": 0.5,
    f"{ACTOR}.kl_loss_coef": 0.5,
    f"{ACTOR}.kl_loss_type": "abs",
    f"{ACTOR}.clip_ratio": 0.001,
    f"{ACTOR}.clip_ratio_c": 1.001,
    f"{ACTOR}.optim.min_lr_ratio": 0.5,
    f"{ACTOR}.optim.num_cycles": 3,
    f"{ACTOR}.optim.total_training_steps": 2,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 64,
    f"{MODEL}.lora_alpha": 64,
    f"{MODEL}.gradient_checkpointing_mode": "selective",
    f"{REF}.log_prob_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.enforce_eager": False,
    f"{ROLLOUT}.gpu_memory_utilization": 0.1,
    f"{ROLLOUT}.load_format": "auto",
    f"{ROLLOUT}.enable_prefix_caching": False,
    f"{ROLLOUT}.val_kwargs.temperature": 0.5,
    "critic.optim.lr": 1e3,
    "critic.ppo_epochs": 2,
    "reward_model.weight": 7,
    "reward_model.overlong_buffer.penalty_factor": 9,
    "algorithm.rollout_correction.rollout_is_threshold": 1.01,
    "data.val_batch_size": 1,
    "trainer.cpus_per_rank": 2,
}


def test_a_step_does_not_depend_on_the_reported_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = {
        "algorithm.adv_estimator": "grpo",
        f"{ROLLOUT}.n": 2,
        "data.train_batch_size": 4,
        "data.max_response_length": 4,
    }
    (usual,) = run_ppo(tmp_path, base, steps=1)
    caplog.clear()
    (changed,) = run_ppo(tmp_path, {**base, **UNREAD}, steps=1)
    reported = " ".join(message.partition("no effect")[0] for message in caplog.messages)
    assert [key for key in UNREAD if f"{key}=" not in reported] == []
    assert all(torch.equal(weight, changed.actor[name]) for name, weight in usual.actor.items())
    timed = ("timing", "perf/")
    assert {name: value for name, value in usual.metrics.items() if not name.startswith(timed)} == {
        name: value for name, value in changed.metrics.items() if not name.startswith(timed)
    }


# -- documented commands --------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]
COMMANDS = {"camshaft ppo": PPOConfig, "python3 -m camshaft.trainer.main_ppo": PPOConfig, "camshaft sft": SFTConfig}
COMMANDS |= {"python3 -m camshaft.trainer.main_sft": SFTConfig, "camshaft rm": RMConfig}
COMMANDS |= {"camshaft generate": GenerateConfig}


def documented_commands(text: str) -> Iterator[tuple[type[Section], list[str]]]:
    """Yield the schema and the overrides of each complete command in a script or in a page."""
    for line in text.replace("\\\n", " ").splitlines():
        for command, schema in COMMANDS.items():
            if line.startswith(f"{command} ") and "..." not in line:
                words = shlex.split(line.removeprefix(command))
                yield schema, [word for word in words if "=" in word]


def notices(schema: type[Section], words: list[str]) -> list[str]:
    """Return the notices of a command whose files do not exist."""
    (job,) = compose_jobs(schema, words)
    tree = merge(raw_defaults(schema), job.tree)
    chosen, _ = choose_automatic(tree, schema, Machine("cuda", 8, frozenset({"vllm"})))
    return list(find_notices(schema.model_validate(resolve(chosen, schema)[0]), tree, overridden_keys(job.overrides)))


@pytest.mark.parametrize("path", sorted(map(str, ROOT.glob("examples/ppo_trainer/*.sh"))))
def test_documented_commands_give_no_notice(path: str) -> None:
    commands = list(documented_commands((ROOT / path).read_text(encoding="utf-8")))
    assert commands
    assert [notices(schema, words) for schema, words in commands] == [[]] * len(commands)


def test_demo_gives_no_notice() -> None:
    demo = runpy.run_path(str(ROOT / "examples" / "arithmetic" / "demo.py"))
    assert notices(SFTConfig, demo["sft_arguments"](Path("out"), 3)) == []
    assert notices(PPOConfig, demo["ppo_arguments"](Path("out"), 3)) == []
