"""Keys of verl are translated, and what is not implemented is answered with its topic."""

import logging
import re
from pathlib import Path

import pytest

from camshaft.config import PPOConfig, load_ppo, load_sft
from camshaft.config.foreign.rows import Expanded, PassedOn, Renamed
from camshaft.config.foreign.topics import PAGE, TOPICS, topic_of_key, topic_of_name
from camshaft.config.foreign.verl import VERL
from camshaft.config.tree import fields, get
from camshaft.errors import ConfigError

ROOT = Path(__file__).parents[3]
A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
FSDP = f"{A}.fsdp_config"


@pytest.fixture
def base(words):
    """Overrides without the engine and the rollout."""
    kept = [word for word in words if not word.startswith((f"{A}.strategy", f"{R}.name"))]
    return [*kept, "trainer.experiment_name=x"]


@pytest.fixture
def notices(caplog):
    caplog.set_level(logging.WARNING, "camshaft.config")
    return caplog


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        (f"+{FSDP}.mixed_precision.param_dtype=bf16", f"{FSDP}.mixed_precision.param_dtype", "bfloat16"),
        (f"{R}.checkpoint_engine.update_weights_bucket_megabytes=64", f"{R}.update_weights_bucket_megabytes", 64),
        (f"{A}.fsdp_config.ulysses_sequence_parallel_size=1", f"{A}.ulysses_sequence_parallel_size", 1),
        (f"{A}.use_prefix_grouper=False", f"{M}.use_prefix_grouper", False),
        ("critic.fsdp.model_dtype=float64", "critic.model.fsdp_config.model_dtype", "float64"),
        (f"{A}.fsdp_config.dtype=bf16", f"{A}.fsdp_config.mixed_precision.param_dtype", "bfloat16"),
        (f"{A}.optim.lr_decay_style=cosine", f"{A}.optim.lr_scheduler_type", "cosine"),
        (f"{M}.lora.rank=4", f"{M}.lora_rank", 4),
        ("reward.num_workers=3", "custom_reward_function.num_workers", 3),
        ("reward_model.num_workers=3", "custom_reward_function.num_workers", 3),
        ("reward_model.reward_manager=batch", "custom_reward_function.batched", True),
        ("reward.reward_manager.name=batch", "custom_reward_function.batched", True),
        ("model_engine=dp", f"{A}.strategy", "fsdp"),
        ("algorithm.adv_estimator=rloo_vectorized", "algorithm.adv_estimator", "rloo"),
        (f"{A}.tau_pos=0.5", f"{A}.policy_loss.tau_pos", 0.5),
        ("model_engine=megatron", f"{A}.strategy", "megatron"),
        (f"{R}.load_format=safetensors", f"{R}.load_format", "hf"),
        ("algorithm=grpo_vectorized", "algorithm.adv_estimator", "grpo"),
    ],
)  # fmt: skip
def test_a_key_with_another_name_is_applied_with_a_notice(base, notices, word, key, value):
    config = load_ppo([*base, word])
    assert get(config.model_dump(), key) == value
    section = word.lstrip("+").partition("=")[0].removesuffix(".model_dtype")
    assert any(section in message for message in notices.messages)


@pytest.mark.parametrize("source", ["reward.reward_kwargs", "+reward_model.reward_kwargs"])
def test_the_overlong_penalty_of_both_homes_of_rewards_is_applied(words, source):
    buffer = f"{source}.overlong_buffer_cfg"
    sizes = [f"{buffer}.enable=True", f"{buffer}.len=128", f"{buffer}.penalty_factor=0.5", f"{source}.max_resp_len=512"]
    overlong = load_ppo([*words, *sizes]).reward_model.overlong_buffer
    assert (overlong.enable, overlong.len, overlong.penalty_factor) == (True, 128, 0.5)
    with pytest.raises(ConfigError, match=r"max_resp_len = 400\n.*ends at data\.max_response_length"):
        load_ppo([*words, *sizes[:3], f"{source}.max_resp_len=400"])


def test_a_served_reward_model_is_loaded_by_an_engine(words, tmp_path, notices):
    (tmp_path / "rm").mkdir()
    (tmp_path / "rm" / "config.json").write_text("{}")
    source = "reward.reward_model"
    config = load_ppo(
        [*words, f"{source}.enable=True", f"{source}.model_path={tmp_path}/rm", f"{source}.rollout.name=vllm"]
    )
    assert (config.reward_model.enable, config.reward_model.model.path) == (True, f"{tmp_path}/rm")
    assert not config.needs_function()
    assert any("reward.reward_model.rollout of verl: not needed" in message for message in notices.messages)


NOT_NEEDED = [
    "trainer.balance_batch=True", f"{R}.calculate_log_probs=True", f"{R}.calculate_log_probs=False",
    f"{M}.use_fused_kernels=True", "actor_rollout_ref.ref.strategy=fsdp2", f"{R}.max_model_len=2048",
    f"{R}.data_parallel_size=1", f"{A}.entropy_from_logits_with_chunking=True",
    f"{A}.fsdp_config.entropy_checkpointing=True", f"{R}.mode=async", "reward_model.reward_manager=dapo",
    "reward.reward_manager.name=naive", "ray_kwargs.ray_init.runtime_env.py_executable=null",
    f"{R}.enable_chunked_prefill=True", "actor_rollout_ref.nccl_timeout=1200",
    f"{A}.calculate_sum_pi_squared=False",
]  # fmt: skip


@pytest.mark.parametrize("word", NOT_NEEDED)
def test_a_key_that_is_not_needed_is_accepted_with_a_notice(base, notices, word):
    config = load_ppo([*base, word])
    assert config == load_ppo(base)
    assert any(f"{word.partition('=')[0]} of verl: " in message for message in notices.messages)


def test_the_sum_of_squared_probabilities_follows_from_the_estimator(base):
    word = f"+{A}.calculate_sum_pi_squared=True"
    assert load_ppo([*base, word, "algorithm=optimal_token_baseline", "n=4"]).needs_sum_pi_squared()
    with pytest.raises(ConfigError, match=r"computed only for algorithm\.adv_estimator=optimal_token_baseline"):
        load_ppo([*base, word, "algorithm=grpo", "n=4"])


@pytest.mark.parametrize(
    "word",
    [
        f"{R}.expert_parallel_size=1", f"{R}.multi_turn.enable=False",
        "distillation.enabled=False", f"{M}.mtp.enable=False", f"{A}.profiler.enable=False",
        "data.custom_cls.path=null", "algorithm.use_pf_ppo=False", f"{R}.quantization=null",
    ],
)  # fmt: skip
def test_a_value_that_asks_for_nothing_is_accepted_in_silence(base, notices, word):
    load_ppo(base)
    expected = list(notices.messages)
    notices.clear()
    assert load_ppo([*base, word])
    assert notices.messages == expected


@pytest.mark.parametrize(
    ("word", "notice"),
    [
        ("distillation.enable=true", "distillation of verl: not read without enabled"),
        ("global_profiler.tool=npu", "global_profiler of verl: not read without steps; Profilers are not"),
    ],
)
def test_keys_of_a_section_that_is_not_enabled_are_named(base, notices, word, notice):
    load_ppo([*base, word])
    assert any(notice in message for message in notices.messages)


def test_notices_of_one_cause_are_one_line(base, notices):
    words = [f"{A}.entropy_checkpointing=True", "actor_rollout_ref.ref.entropy_checkpointing=True"]
    load_ppo([*base, *words])
    (line,) = [message for message in notices.messages if "entropy_checkpointing" in message]
    assert line.startswith(f"config: {A}.entropy_checkpointing, actor_rollout_ref.ref.entropy_checkpointing of verl: ")


def test_options_of_vllm_are_passed_on(base):
    words = [f"{R}.name=vllm", f"+{R}.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY"]
    words += [f"{R}.enable_chunked_prefill=False", f"{R}.expert_parallel_size=4", f"{R}.engine_kwargs.vllm.seed=3"]
    assert load_ppo([*base, *words]).actor_rollout_ref.rollout.engine_kwargs == {
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
        "enable_chunked_prefill": False, "enable_expert_parallel": True, "seed": 3,
    }  # fmt: skip


def test_options_of_another_rollout_are_not_passed_on(base, notices):
    words = [f"{R}.name=vllm", f"{R}.engine_kwargs.sglang.attention_backend=triton"]
    assert load_ppo([*base, *words]).actor_rollout_ref.rollout.engine_kwargs == {}
    assert any("not read without actor_rollout_ref.rollout.name=sglang" in message for message in notices.messages)


def test_options_of_megatron_are_passed_on(base):
    settings = f"+{A}.megatron.override_transformer_config"
    words = [
        "model_engine=megatron", f"{R}.name=vllm", f"{A}.megatron.tensor_model_parallel_size=1",
        f"{A}.megatron.sequence_parallel=False", f"{A}.megatron.param_offload=True", f"{A}.megatron.grad_offload=True",
        f"{settings}.recompute_granularity=full", f"{settings}.recompute_num_layers=1",
        f"{settings}.moe_router_dtype=fp32", f"{settings}.apply_rope_fusion=True",
        f"{settings}.moe_aux_loss_coeff=0.01", f"{settings}.moe_router_load_balancing_type=aux_loss",
        f"{settings}.moe_z_loss_coeff=0.001",
        "actor_rollout_ref.ref.megatron.expert_model_parallel_size=1", f"{A}.use_torch_compile=True",
    ]  # fmt: skip
    config = load_ppo([*base, *words])
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    options = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "moe_router_dtype": "fp32"}
    options |= {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
    assert actor.engine_kwargs == options
    assert ref.engine_kwargs == options | {"expert_model_parallel_size": 1}
    assert actor.fsdp_config.param_offload
    assert not actor.fsdp_config.grad_offload
    assert config.actor_rollout_ref.model.enable_gradient_checkpointing
    with pytest.raises(ConfigError, match="num_layers_in_last_pipeline_stage=3 has no effect with pipeline_model_par"):
        load_ppo([*base, *words, f"{settings}.num_layers_in_last_pipeline_stage=3"])


@pytest.mark.parametrize("word", ["enable=True", "interaction_config_path=interaction.yaml"])
def test_turns_of_verl_name_the_environment(base, word):
    with pytest.raises(ConfigError, match=r"a class with the methods reset and step\. Set .*\.environment=file\.py"):
        load_ppo([*base, f"{R}.multi_turn.{word}"])


@pytest.mark.parametrize(
    "word",
    [
        f"{R}.agent.default_agent_loop=tool_agent",
        f"{R}.agent.agent_loop_config_path=loops.yaml",
        "openenv=wordle",
        "verifiers=gsm8k",
    ],
)
def test_programs_of_other_libraries_name_the_agent(base, word):
    with pytest.raises(ConfigError, match=r"agent=file\.py:function"):
        load_ppo([*base, word])


@pytest.mark.parametrize(
    ("word", "topic"),
    [
        (f"{R}.multi_turn.tool_config_path=tools.yaml", "Tools"),
        (f"{R}.data_parallel_size=4", "Expert parallelism over several vLLM engines"),
        (f"{R}.name=trtllm", "TensorRT-LLM"),
        ("data.image_key=images", "Images"),
        ("data.custom_cls.path=own.py", "Data set classes"),
        ("distillation.enabled=True", "Distillation"),
        (f"{M}.mtp.enable=True", "Multi-token prediction"),
        (f"{A}.profiler.enable=True", "Profilers"),
        ("global_profiler.steps=[1,2]", "Profilers"),
        ("reward_model.reward_manager=prime", "Reward managers"),
        ("reward.sandbox_fusion.url=http://a", "Code sandboxes"),
        ("model_engine=veomni", "VeOmni"),
        (f"{A}.megatron.use_megatron_fsdp=True", "Megatron-FSDP"),
        ("actor_rollout_ref.ref.megatron.router_replay.mode=R3", "Router replay of other models"),
        (f"{A}.megatron.expert_tensor_parallel_size=2", "Other options of Megatron"),
        (f"{A}.megatron.dist_checkpointing_path=/a", "Megatron checkpoints"),
        (
            f"+{A}.megatron.override_transformer_config.moe_router_load_balancing_type=seq_aux_loss",
            "Load balancing per sequence",
        ),
        (
            f"+{A}.megatron.override_transformer_config.account_for_loss_in_pipeline_split=True",
            "Layouts of pipeline stages",
        ),
        (f"+{A}.megatron.override_transformer_config.hidden_dropout=0.1", "Other options of Megatron"),
        (f"{A}.fsdp_config.qat.enable=True", "Low precision"),
        (f"{A}@{A}=mlite_actor", "Megatron-lite"),
        # of no library, and of other ones
        ("vlm=1", "Images"),
        ("load_in_4bit=True", "Low precision"),
        ("qlora=8", "Low precision"),
        ("push_to_hub=True", "Uploads"),
        ("algorithm=dpo", "DPO"),
        ("algorithm=kto", "KTO"),
        ("deepspeed=zero3.json", "DeepSpeed"),
        ("max_async_level=2", "Overlapping rows"),
        ("use_rslora=True", "Variants of LoRA"),
        ("use_dora=True", "Variants of LoRA"),
        ("init_lora_weights=pissa", "Variants of LoRA"),
        ("neftune_noise_alpha=5", "Noise in the embeddings"),
        ("prm=model", "Process rewards"),
        ("lm_eval_tasks=[gsm8k]", "Benchmark suites"),
        ("optim=adamw_8bit", "Low precision"),
        ("adapter=qlora", "Low precision"),
        ("stage=kto", "KTO"),
    ],
)
def test_what_is_not_implemented_is_answered_with_its_topic(base, word, topic):
    (expected,) = [entry for entry in TOPICS if entry.title == topic]
    with pytest.raises(ConfigError) as caught:
        load_ppo([*base, word])
    text = str(caught.value)
    assert expected.message() in text
    assert "Did you mean" not in text
    assert "Keys begin with" not in text


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("num_generations=8", "Did you mean n (short for actor_rollout_ref.rollout.n)?"),
        ("learning_rate=1e-5", "Did you mean lr (short for actor_rollout_ref.actor.optim.lr)?"),
        ("epsilon=0.2", f"Did you mean {A}.clip_ratio?"),
        ("loss_type=dr_grpo", f"a name of TRL; set {A}.loss_agg_mode=seq-mean-token-sum-norm; TRL's default is dapo."),
        ("loss_type=luspo", f"{A}.loss_agg_mode=token-mean or {A}.loss_agg_mode=seq-mean-token-sum-norm"),
        ("use_vllm=True", "a name of TRL; set rollout=vllm."),
        ("logging_steps=1", "not needed, unlike in TRL: every step is logged. Omit the key."),
        ("packing_samples=True", "not needed, unlike in OpenRLHF: batches are never padded. Omit the key."),
        ("zero_stage=3", "DeepSpeed is not an engine of camshaft."),
        ("remote_rm_url=score.py", "an async function that calls the server"),
        # words of no library
        ("num_gpus=8", "Did you mean devices (short for trainer.n_gpus_per_node)?"),
        ("max_tokens=8", "Did you mean response_length"),
        ("save_every=8", "Did you mean trainer.save_freq?"),
        ("tp=2", "set actor_rollout_ref.rollout.tensor_model_parallel_size for the rollout"),
        ("pp=2", f"set {A}.engine_kwargs.pipeline_model_parallel_size with engine=megatron"),
        ("resume=true", "a run resumes if its command is repeated with the same out=<folder>."),
        ("lora_dropout=0.1", "adapters have no dropout; omit the key"),
        ("callbacks=[a]", "on_step=my_hooks.py:function"),
        ("enable_thinking=false", "chat_template_kwargs={enable_thinking: ...}"),
        ("mask_truncated_completions=true", "truncated responses are not masked"),
        ("fp16=true", "computation in float16 is not supported"),
        ("packing=true", "not needed, unlike in TRL: batches are never padded. Omit the key."),
        ("scale_rewards=none", "a name of TRL; set algorithm.norm_adv_by_std_in_grpo=false."),
        (
            "scale_rewards=batch",
            "a name of TRL; division by the standard deviation of the batch is algorithm=",
        ),
        ("orchestrator.batch_size=8", "a section of prime-rl"),
        ("base_model=a", "Did you mean model (short for actor_rollout_ref.model.path)?"),
        ("random_state=3407", "Did you mean seed (short for trainer.seed)?"),
        ("fast_inference=True", "set rollout=vllm."),
        ("wandb_project=a", "Did you mean trainer.project_name?"),
        ("full_finetuning=true", "all weights are trained unless lora is set"),
        ("model.path=a", "Did you mean model (short for actor_rollout_ref.model.path)?"),
        ("strategy=fsdp2", "Did you mean engine (short for actor_rollout_ref.actor.strategy)?"),
        ("gae_lambda=0.95", "Did you mean algorithm.lam?"),
        ("temp=0.7", "Did you mean actor_rollout_ref.rollout.temperature?"),
        ("max_model_len=4096", "not needed: it follows from prompt_length and response_length."),
        ("kv_cache_dtype=fp8", "set actor_rollout_ref.rollout.engine_kwargs.kv_cache_dtype"),
        ("wandb_api_key=a", "set the environment variable WANDB_API_KEY"),
        ("cutoff_len=2048", "It stands for max_length of camshaft sft."),
        ("tokenizer_name=a", "Did you mean data.tokenizer?"),
    ],
)
def test_names_of_trl_and_openrlhf_are_answered(words, word, expected):
    with pytest.raises(ConfigError) as caught:
        load_ppo([*words, word])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("bf16=true", "set fsdp_config.mixed_precision.param_dtype=bfloat16; master weights stay float32."),
        ("use_cpu=true", "a name of TRL; set device=cpu."),
        ("max_grad_norm=1", "Did you mean grad_clip?"),
        ("warmup_ratio=0.1", "Did you mean optim.lr_warmup_steps_ratio?"),
        ("gradient_checkpointing=true", "Did you mean model.enable_gradient_checkpointing?"),
        ("lora_alpha=16", "Did you mean model.lora_alpha?"),
        ("tp=2", "Did you mean fsdp_config.tensor_parallel_size?"),
        ("beta=0.1", "It stands for actor_rollout_ref.actor.kl_loss_coef of camshaft ppo."),
        ("num_generations=4", "It stands for n of camshaft ppo."),
        ("packing=true", "not needed, unlike in TRL: batches are never padded."),
        ("assistant_only_loss=true", "only responses are trained on"),
        ("dataset_text_field=text", "Training on plain text (pretraining) is not implemented"),
        ("resume=true", "a run resumes if its command is repeated with the same out=<folder>."),
        ("partial_pretrain=a", "Did you mean model (short for model.path)?"),
        ("model.partial_pretrain=a", "Did you mean model (short for model.path)?"),
        ("model.strategy=fsdp2", "Did you mean engine (short for strategy)?"),
        ("data.multiturn.enable=true", "conversations of several turns are read from the column messages"),
        ("data.messages_key=turns", "conversations of several turns are read from the column messages"),
        # axolotl, LLaMA-Factory, Unsloth
        ("sequence_len=1024", "Did you mean max_length (short for data.max_length)?"),
        ("cutoff_len=1024", "Did you mean max_length (short for data.max_length)?"),
        ("sample_packing=true", "not needed: batches are never padded."),
        ("train_on_inputs=false", "not needed: only responses are trained on."),
        ("val_set_size=0.1", "Did you mean val_data (short for data.val_files)?"),
        ("finetuning_type=lora", "set lora=16; without lora all weights are trained."),
        ("adapter=qlora", "Training on quantized weights"),
        ("lora_target_linear=true", "set model.target_modules=all-linear."),
        ("template=qwen", "the chat template is that of the tokenizer"),
        ("stage=sft", "not needed: the command says it."),
        ("stage=dpo", "Preference optimization (DPO and its variants) is not implemented."),
    ],
)
def test_names_of_other_libraries_are_answered_by_supervised_commands(sft_words, word, expected):
    with pytest.raises(ConfigError) as caught:
        load_sft([*sft_words, word])
    assert expected in str(caught.value)


@pytest.mark.parametrize("arguments", ["--config a/b.yaml", "--config=a/b.yaml", "-f a/b.yaml", "a/b.yaml"])
def test_a_config_file_of_another_library_is_answered_with_the_options(arguments):
    from camshaft.config import compose

    with pytest.raises(ConfigError, match=r"Write --config-dir a --config-name b for a file with keys of camshaft"):
        compose(arguments.split(), PPOConfig)


def test_a_reward_model_without_a_path_is_told_to_set_it(words):
    with pytest.raises(ConfigError, match=r"the default does not exist\. Set reward_model\.model\.path to"):
        load_ppo([*words, "reward_model.enable=true", "reward_model.model.path=~/models/Anomy-RM-v0.1"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("dpo", "Preference optimization"),
        ("prm", "Process reward models (PRM) are not implemented"),
        ("packing", "batches are never padded"),
    ],
)
def test_config_explain_knows_what_is_not_a_key(word, expected):
    from camshaft.config import explain

    with pytest.raises(ConfigError, match=re.escape(expected)):
        explain(word, "ppo")


def test_a_reward_model_and_a_function_score_together(words, tmp_path):
    (tmp_path / "score.py").write_text("def compute_score(**row):\n    return 0.0\n")
    own = [
        f"reward.custom_reward_function.path={tmp_path}/score.py",
        "reward.custom_reward_function.name=compute_score",
    ]
    config = load_ppo(
        [*words, "reward.reward_model.enable=True", f"reward.reward_model.model_path={tmp_path}/model", *own]
    )
    assert config.needs_function()
    assert config.reward_model.enable


def test_an_npu_is_refused_with_vllm_only(base, words):
    with pytest.raises(ConfigError, match="Ascend NPUs"):
        load_ppo([*base, "trainer.device=npu", f"{R}.name=vllm"])
    assert load_ppo([*words, "trainer.device=npu"]).trainer.device == "npu"


def test_a_topic_is_one_problem(base):
    with pytest.raises(ConfigError) as caught:
        load_ppo([*base, *(f"{A}.profiler.{word}" for word in ("enable=True", "ranks=[0]", "all_ranks=False"))])
    assert "1 error in the config" in str(caught.value)
    assert f"The same applies to {A}.profiler.ranks, {A}.profiler.all_ranks." in str(caught.value)


@pytest.mark.parametrize("command", ["dpo", "kto", "distill", "push", "prm", "chat", "vllm", "lm_eval", "pretrain"])
def test_a_command_that_does_not_exist_is_answered_with_its_topic(command, capsys):
    from camshaft.cli import main

    assert main([command, "model=a"]) == 2
    topic = topic_of_name(command)
    assert topic is not None
    assert topic.message() in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("grpo", "ppo algorithm=grpo ..."),
        ("train", "ppo ..."),
        ("trian", "ppo ..."),
        ("pppo", "ppo."),
        ("finetune", "sft ..."),
        ("reward-model", "rm ..."),
        ("infer", "generate ..."),
        ("merge", "export CHECKPOINT."),
        ("accelerate", "ppo devices=8 ..., which starts its processes."),
        ("tune", "ppo -m lr=1e-6,3e-6 ..."),
        ("plto", "plot."),
    ],
)
def test_another_name_of_a_command_is_answered_with_the_command(command, written, capsys):
    from camshaft.cli import main

    assert main([command, "model=a"]) == 2
    assert f"Write camshaft {written}" in capsys.readouterr().err


def test_an_unknown_command_is_told_where_commands_are_listed(capsys):
    from camshaft.cli import main

    assert main(["wombat"]) == 2
    assert capsys.readouterr().err == "camshaft has no command 'wombat'. camshaft --help lists the commands.\n"


@pytest.mark.parametrize("word", ["engine=deepspeed", "engine=jax", "rollout=trtllm"])
def test_an_engine_or_rollout_that_does_not_exist_is_answered_with_its_topic(base, word):
    topic = topic_of_key(word.partition("=")[2])
    with pytest.raises(ConfigError) as caught:
        load_ppo([*base, word])
    assert topic is not None
    assert topic.message() in str(caught.value)


def test_an_unknown_algorithm_is_not_answered_with_one_of_another_letter(base):
    with pytest.raises(ConfigError) as caught:
        load_ppo([*base, "algorithm=vapo"])
    assert "Did you mean" not in str(caught.value)


def test_an_option_of_another_library_is_answered_with_its_topic(words):
    from camshaft.config import compose

    with pytest.raises(ConfigError, match=r"--push_to_hub: Models are not uploaded"):
        compose([*words, "--push_to_hub"], PPOConfig)


def test_supervised_commands_know_the_topics(sft_words):
    with pytest.raises(ConfigError, match=r"Training on quantized weights"):
        load_sft([*sft_words, "load_in_4bit=True"])


@pytest.mark.parametrize(
    "word",
    [f"{R}.length_penalty=1", f"{R}.cascade.enable=1", "trainer.wombat_size=3", "wombat=3"],
)
def test_a_key_without_a_near_one_gets_no_suggestion(words, word):
    with pytest.raises(ConfigError, match=r"unknown key\. Keys begin with"):
        load_ppo([*words, word])


def test_a_contradiction_of_a_key_and_its_name_in_verl_is_an_error(words):
    source = f"{R}.checkpoint_engine.update_weights_bucket_megabytes"
    with pytest.raises(ConfigError, match=r"stands for .*=64, which is set to 32"):
        load_ppo([*words, f"{source}=64", f"{R}.update_weights_bucket_megabytes=32"])
    load_ppo([*words, f"{source}=64", f"{R}.update_weights_bucket_megabytes=64"])


def test_frozen_weights_of_a_run_with_lora_are_bfloat16(base):
    words = [*base, f"{A}.fsdp_config.model_dtype=bf16"]
    fsdp = load_ppo([*words, f"{M}.lora_rank=8"]).actor_rollout_ref.actor.fsdp_config
    assert (fsdp.model_dtype, fsdp.compute_dtype()) == ("bfloat16", "bfloat16")
    with pytest.raises(ConfigError, match="training bfloat16 weights is not implemented"):
        load_ppo(words)


def test_config_files_of_verl_are_known(base):
    config = load_ppo([*base, f"{R}.name=vllm"], "config", "ppo_megatron_trainer.yaml")
    assert config.actor_rollout_ref.actor.strategy == "megatron"
    assert load_ppo(base, "./config", "ppo_trainer") == load_ppo(base)


def test_a_plus_before_an_existing_key_is_accepted(words):
    assert load_ppo([*words, "+trainer.seed=3"]).trainer.seed == 3


def test_rows_lead_to_keys():
    keys = fields(PPOConfig)
    for row in VERL:
        if isinstance(row, Renamed):
            assert row.key in keys, row
        elif isinstance(row, PassedOn):
            assert row.key.partition(".engine_kwargs")[0] + ".engine_kwargs" in keys, row
        elif isinstance(row, Expanded):
            assert all(key in keys for settings in row.values.values() for key in settings), row


def test_the_page_has_a_section_for_each_topic():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+)\n\n((?:.+\n)+)\n", text, re.MULTILINE))
    assert list(sections) == [topic.title for topic in TOPICS]
    assert {title: " ".join(body.split()) for title, body in sections.items()} == {t.title: t.sentence for t in TOPICS}


def test_no_key_is_a_topic():
    named = {key: topic for key in fields(PPOConfig) if (topic := topic_of_key(key)) is not None}
    assert not named


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (
            "async_training.staleness_threshold=0.1",
            "a share of the samples of a step. Set async_training.max_staleness=1",
        ),
        ("max_staleness=0.1", "a number of versions of the weights, and not a share of the samples"),
        ("async_training.partial_rollout=True", "go on with newer weights are not implemented"),
        ("async_training.trigger_parameter_sync_step=4", "published after each step"),
        ("trigger_parameter_sync_step=4", "published after each step"),
        ("trainer.v1.trainer_mode=separate_async", "Set async_training.max_staleness=1"),
        ("trainer.v1.sampler.max_off_policy_threshold=8", "Set async_training.max_staleness=1"),
        ("max_off_policy_strategy=drop", "set max_staleness=1"),
        ("rollout.max_head_offpolicyness=4", "max_staleness (short for async_training.max_staleness)"),
        ("max_head_offpolicyness=4", "max_staleness (short for async_training.max_staleness)"),
        ("max_off_policy_steps=8", "max_staleness (short for async_training.max_staleness)"),
        ("max_steps_off_policy=3", "max_staleness (short for async_training.max_staleness)"),
        ("trainer.fully_async.max_staleness_steps=4", "set max_staleness=1"),
        ("max_trajectory_age_steps=1", "max_staleness (short for async_training.max_staleness)"),
        ("weight_sync_steps=1", "published after each step"),
        ("actor.prox_logp_method=loglinear", "loglinear is loss_type=interpolated"),
        ("async_training.mode=stream", "go on with newer weights, are not implemented yet"),
        ("async_train=True", "set max_staleness=1"),
    ],
)
def test_names_of_asynchronous_training_are_answered_with_the_key(words, word, text):
    with pytest.raises(ConfigError) as caught:
        load_ppo([*words, f"+{word}" if "." in word else word])
    assert text in " ".join(str(caught.value).split())
