"""Keys of verl that camshaft names otherwise, does not need, passes on to a backend, or does not implement.

Both libraries have the same sections, so a command line of verl needs no other changes (`translate.py`). A row of a key
stands before that of its section.
"""

from collections.abc import Mapping
from typing import Any

from camshaft.config.foreign import topics
from camshaft.config.foreign.rows import Accepts, Expanded, Missing, NotNeeded, PassedOn, Renamed, Row
from camshaft.config.tree import get, has_key

ACTOR, REF, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
ROLLOUT, CRITIC, REWARD = "actor_rollout_ref.rollout", "critic", "reward_model"
FUNCTION, STRATEGY = "custom_reward_function", f"{ACTOR}.strategy"
RAY = "ray_kwargs.ray_init.runtime_env"
TURNS = f"{ROLLOUT}.multi_turn"
_ENVIRONMENT = (
    f"Episodes have an environment, a class with the methods reset and step. Set {TURNS}.environment=file.py:Class. "
    "See docs/agents.md."
)
_AGENT = (
    f"A program that owns the conversation is a function or a command. Set {TURNS}.agent=file.py:function, or "
    f"{TURNS}.environment=file.py:Class for a class with the methods reset and step. See docs/agents.md."
)
_ONE_TURN = "without an environment or a program, a response is one generation"

CONFIG_FILES: dict[str, dict[str, Any]] = {"ppo_trainer": {}, "ppo_megatron_trainer": {STRATEGY: "megatron"}}
"""Default config files of verl, with the settings that they stand for here."""

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_NEVER_PADDED = "batches are never padded"
_CHUNKED = "log-probs and entropy are always computed in chunks, without materialized logits"
_SAME_RESULT = "it changes no result"


def _value(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    return get(tree, key) if has_key(tree, key) else default


def _generates_with(*names: str) -> Accepts:
    """Return the condition that the rollout is one of `names`."""
    return lambda value, tree: _value(tree, f"{ROLLOUT}.name") in names


def _is_megatron(value: Any, tree: Mapping[str, Any]) -> bool:
    return _value(tree, STRATEGY) == "megatron"


def _is_engine_of_actor(value: Any, tree: Mapping[str, Any]) -> bool:
    actor = _value(tree, STRATEGY, "fsdp")
    return value == actor or {value, actor} <= {"auto", "fsdp", "fsdp2"}


def _is_response_length(value: Any, tree: Mapping[str, Any]) -> bool:
    return value == _value(tree, f"{ROLLOUT}.response_length", _value(tree, "data.max_response_length", 512))


def _is_long_enough(value: Any, tree: Mapping[str, Any]) -> bool:
    lengths = (_value(tree, f"data.max_{part}_length", 512) for part in ("prompt", "response"))
    return value >= sum(lengths)


def _has_token_baseline(value: Any, tree: Mapping[str, Any]) -> bool:
    return not value or str(_value(tree, "algorithm.adv_estimator")).endswith("optimal_token_baseline")


def _has_adapter(tree: Mapping[str, Any]) -> bool:
    return bool(_value(tree, f"{MODEL}.lora_rank"))


# -- tables ---------------------------------------------------------------------------------------


def _engine(section: str, sharding: str, source: str = "") -> tuple[Row, ...]:
    """Return the rows of a section with an engine, and of the section `source` with the options of FSDP in verl."""
    source = source or sharding
    chunks = ("entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size", "entropy_checkpointing")
    padding = ("pad_to_length", "pad_to_length_bucket")
    return (
        *(NotNeeded(f"{place}.{name}", _CHUNKED) for place in (section, source) for name in chunks),
        *(NotNeeded(f"{place}.{name}", _NEVER_PADDED) for place in (section, source) for name in padding),
        Renamed(f"{source}.ulysses_sequence_parallel_size", f"{section}.ulysses_sequence_parallel_size"),
        Renamed(f"{source}.use_torch_compile", f"{section}.use_torch_compile"),
        Renamed(f"{source}.dtype", f"{sharding}.mixed_precision.param_dtype", values=_DTYPES),
        NotNeeded(f"{source}.mixed_precision.buffer_dtype", "buffers are float32", ("float32", "fp32")),
        NotNeeded(f"{source}.use_orig_params", "FSDP2 always keeps the original parameters"),
        NotNeeded(f"{source}.forward_only", "it follows from the role"),
        NotNeeded(f"{source}.strategy", f"it follows {section}.strategy"),
        NotNeeded(f"{source}.seed", "all seeds follow from trainer.seed"),
        NotNeeded(f"{source}.full_determinism", "runs are reproducible", (False,)),
        Missing(f"{source}.qat", topics.LOW_BIT, switch="enable"),
        Missing(f"{source}.turbo_config", topics.NPU),
        Missing(f"{section}.veomni", topics.VEOMNI),
        Missing(f"{section}.profiler", topics.PROFILERS, switch="enable"),
        NotNeeded(f"{section}.rollout_n", f"it follows {ROLLOUT}.n"),
        NotNeeded(f"{section}.data_loader_seed", "the order of the sequences follows from trainer.seed"),
        *(() if source == sharding else (Renamed(source, sharding),)),
    )


_KERNELS = (
    "apply_rope_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion",
    "gradient_accumulation_fusion", "persist_layer_norm", "moe_permute_fusion", "moe_grouped_gemm", "use_flash_attn",
    "use_fused_rmsnorm", "use_fused_swiglu", "attention_backend",
)  # fmt: skip
_TRANSPORT = (
    "moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_shared_expert_overlap",
    "deallocate_pipeline_outputs",
)  # fmt: skip
_STAGES = (
    "account_for_loss_in_pipeline_split", "account_for_embedding_in_pipeline_split", "pipeline_model_parallel_layout",
)  # fmt: skip
_PASSED_ON = (
    "sequence_parallel", "moe_router_dtype", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
)  # fmt: skip


def _megatron(section: str, sharding: str) -> tuple[Row, ...]:
    """Return the rows of the section `megatron`, whose options are `engine_kwargs` here."""
    source = f"{section}.megatron"
    return (
        NotNeeded(
            f"{section}.use_torch_compile", "the layers of Megatron are not compiled",
            lambda value, tree: value is True and has_key(tree, source),
        ),
        Renamed(f"{source}.param_offload", f"{sharding}.param_offload"),
        NotNeeded(f"{source}.optimizer_offload", "the reference has no optimizer")
        if section == REF
        else Renamed(f"{source}.optimizer_offload", f"{sharding}.optimizer_offload"),
        Renamed(f"{source}.dtype", f"{sharding}.mixed_precision.param_dtype", values=_DTYPES),
        NotNeeded(f"{source}.grad_offload", "gradients stay on the device, in the buffers of Megatron"),
        *(
            NotNeeded(f"{source}.{name}", "weights are read from and exported as Hugging Face folders")
            for name in ("use_mbridge", "vanilla_mbridge", "load_weight")
        ),
        NotNeeded(f"{source}.use_remove_padding", _NEVER_PADDED),
        NotNeeded(
            f"{source}.expert_tensor_parallel_size", "tensor-parallel ranks hold whole experts", (1,),
            topics.MEGATRON_OPTIONS,
        ),
        NotNeeded(
            f"{source}.use_dist_checkpointing", "the weights are those of the model folder",
            lambda value, tree: not _value(tree, f"{source}.dist_checkpointing_path"), topics.MEGATRON_CHECKPOINTS,
        ),
        Missing(f"{source}.dist_checkpointing_path", topics.MEGATRON_CHECKPOINTS, off=("",)),
        NotNeeded(f"{source}.seed", "all seeds follow from trainer.seed"),
        Missing(f"{source}.use_megatron_fsdp", topics.MEGATRON_FSDP),
        Renamed(f"{source}.router_replay", f"{section}.router_replay")
        if section == ACTOR
        else Missing(f"{source}.router_replay", topics.OTHER_REPLAY, off=("disabled",)),
        *_transformer(section, f"{source}.override_transformer_config"),
        PassedOn(
            source, f"{section}.engine_kwargs", _is_megatron, f"{STRATEGY}=megatron",
            base=f"{ACTOR}.engine_kwargs" if section == REF else "",
        ),
    )  # fmt: skip


def _transformer(section: str, source: str) -> tuple[Row, ...]:
    """Return the rows of the settings of Megatron's transformer."""
    checkpointing = f"{section if section == CRITIC else 'actor_rollout_ref'}.model.enable_gradient_checkpointing"
    return (
        Expanded(f"{source}.recompute_granularity", {"full": {checkpointing: True}}, otherwise=topics.MEGATRON_OPTIONS),
        *(
            NotNeeded(f"{source}.{name}", "gradient checkpointing recomputes each layer")
            for name in ("recompute_method", "recompute_num_layers")
        ),
        *(NotNeeded(f"{source}.{name}", f"{_SAME_RESULT}, only the kernels") for name in _KERNELS),
        *(NotNeeded(f"{source}.{name}", f"{_SAME_RESULT}, only the transport of tokens") for name in _TRANSPORT),
        NotNeeded(
            f"{source}.moe_aux_loss_coeff",
            "moe_router_load_balancing_type=none computes no loss",
            lambda value, tree: _value(tree, f"{source}.moe_router_load_balancing_type") == "none",
        ),
        NotNeeded(
            f"{source}.moe_router_load_balancing_type",
            "the loss covers all tokens of a mini-batch",
            ("none", "aux_loss", "global_aux_loss"),
            topics.MEGATRON_AUX,
        ),
        *(Missing(f"{source}.{name}", topics.UNEVEN_STAGES) for name in _STAGES),
        *(Missing(f"{source}.{name}", topics.NPU) for name in ("context_parallel_algo", "use_naive_l2norm")),
        *(
            PassedOn(f"{source}.{name}", f"{section}.engine_kwargs.{name}", _is_megatron, f"{STRATEGY}=megatron")
            for name in _PASSED_ON
        ),
        Missing(source, topics.MEGATRON_OPTIONS),
    )


def _optimizer(section: str, sharding: str) -> tuple[Row, ...]:
    source = f"{section}.optim"
    return (
        Renamed(f"{source}.lr_decay_style", f"{source}.lr_scheduler_type"),
        Expanded(f"{source}.optimizer_impl", {"torch.optim": {}}, otherwise=f"Set {source}.optimizer=module:Class."),
        NotNeeded(f"{source}.zero_indexed_step", "the first step has the first learning rate of the schedule", (True,)),
        Renamed(f"{source}.override_optimizer_config.optimizer_cpu_offload", f"{sharding}.optimizer_offload"),
        *(
            NotNeeded(f"{source}.override_optimizer_config.{name}", f"{_SAME_RESULT}, only where the optimizer runs")
            for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "offload_fraction")
        ),
        NotNeeded(
            f"{source}.override_optimizer_config.use_precision_aware_optimizer", "the optimizer state is float32"
        ),
    )


MODEL_ROWS: tuple[Row, ...] = (
    NotNeeded(f"{MODEL}.use_fused_kernels", _CHUNKED),
    NotNeeded(f"{MODEL}.fused_kernel_options", _CHUNKED),
    NotNeeded(f"{MODEL}.use_liger", f"{_SAME_RESULT}, only the kernels"),
    NotNeeded(f"{MODEL}.tiled_mlp", f"{_SAME_RESULT}, only the memory of the update"),
    NotNeeded(f"{MODEL}.use_shm", "a remote model is cached on the local disk"),
    NotNeeded(
        f"{MODEL}.hf_config_path", "it is the model folder", lambda value, tree: value == _value(tree, f"{MODEL}.path")
    ),
    Missing(f"{MODEL}.mtp", topics.MTP, switch="enable"),
    Expanded(
        f"{MODEL}.lora.merge",
        {True: {f"{ROLLOUT}.lora_weights": "merged"}, False: {f"{ROLLOUT}.lora_weights": "adapter"}},
    ),
    Renamed(f"{MODEL}.lora.rank", f"{MODEL}.lora_rank"),
    Renamed(f"{MODEL}.lora.alpha", f"{MODEL}.lora_alpha"),
    Renamed(f"{MODEL}.lora.adapter_path", f"{MODEL}.lora_adapter_path"),
    NotNeeded(f"{MODEL}.lora.dropout", "adapters have no dropout", (0,)),
    NotNeeded(f"{MODEL}.lora.type", "adapters are LoRA", ("lora",)),
)  # fmt: skip

ACTOR_ROWS: tuple[Row, ...] = (
    *(
        Expanded(
            name,
            {
                "dp": {STRATEGY: "fsdp"}, "fsdp": {STRATEGY: "fsdp"}, "fsdp2": {STRATEGY: "fsdp2"},
                "megatron": {STRATEGY: "megatron"}, "torchtitan": {STRATEGY: "torchtitan"},
            },
        )
        for name in ("model_engine", f"{ACTOR}.model_engine")
    ),
    Missing("model_engine", topics.VEOMNI, only=("veomni",)),
    Missing("model_engine", topics.AUTOMODEL, only=("automodel",)),
    Missing(f"{ACTOR}.engine", topics.MEGATRON_LITE),
    Renamed(f"{ACTOR}.tau_pos", f"{ACTOR}.policy_loss.tau_pos"),
    Renamed(f"{ACTOR}.tau_neg", f"{ACTOR}.policy_loss.tau_neg"),
    Renamed(f"{ACTOR}.use_prefix_grouper", f"{MODEL}.use_prefix_grouper"),
    Expanded(
        f"{MODEL}.custom_chat_template", {}, otherwise="Write the template to a file, and set data.chat_template to it."
    ),
    NotNeeded(f"{ACTOR}.use_fused_kernels", _CHUNKED),
    NotNeeded(f"{ACTOR}.use_remove_padding", _NEVER_PADDED),
    NotNeeded(
        f"{ACTOR}.calculate_sum_pi_squared", "it follows from algorithm.adv_estimator", _has_token_baseline,
        "It is computed only for algorithm.adv_estimator=optimal_token_baseline. Omit the key.",
    ),
    NotNeeded(f"{ACTOR}.sum_pi_squared_checkpointing", "it is computed in chunks, without materialized logits"),
    NotNeeded(f"{ACTOR}.loss_scale_factor", "the norm is data.max_response_length", ()),
    Missing(f"{ACTOR}.freeze_vision_tower", topics.IMAGES),
    *(
        NotNeeded(f"{section}.checkpoint.{name}", why)
        for section in (ACTOR, CRITIC)
        for name, why in {
            "strict": "all contents of a checkpoint are loaded",
            "load_contents": "all contents of a checkpoint are loaded",
        }.items()
    ),
    NotNeeded("actor_rollout_ref.nccl_timeout", "trainer.worker_timeout limits the calls to the ranks"),
)  # fmt: skip

_ADAPTER_DTYPE = tuple(
    Expanded(
        f"{section}.fsdp_config.model_dtype",
        {"bf16": {f"{section}.fsdp_config.model_dtype": "bfloat16"}},
        "with LoRA: the dtype of the frozen weights",
        when=_has_adapter,
    )
    for section in (ACTOR, REF)
)

REF_ROWS: tuple[Row, ...] = (
    *_ADAPTER_DTYPE,
    NotNeeded(
        f"{REF}.strategy", "the reference runs on the engine of the actor", _is_engine_of_actor,
        f"The reference runs on the engine of the actor. Set {STRATEGY}, or omit the key.",
    ),
    NotNeeded(f"{REF}.fsdp_config.optimizer_offload", "the reference has no optimizer"),
    Missing(f"{REF}.router_replay", topics.OTHER_REPLAY, off=("disabled",)),
)  # fmt: skip

_ENGINE_KWARGS = f"{ROLLOUT}.engine_kwargs"
_USES_VLLM, _VLLM = _generates_with("vllm", "server"), f"{ROLLOUT}.name=vllm"

_ROLLOUT_POOL = (
    "A rollout on devices of its own has a pool: set trainer.resource_pools.rollout.n_gpus_per_node, with nnodes for "
    "several machines, and async_training.max_staleness=1, or actor_rollout_ref.hybrid_engine=false alone."
)

ROLLOUT_ROWS: tuple[Row, ...] = (
    NotNeeded(f"{_ENGINE_KWARGS}.vllm.max_model_len", "it follows from the lengths of prompts and responses"),
    Missing(f"{_ENGINE_KWARGS}.vllm.quantization", topics.LOW_BIT),
    PassedOn(f"{_ENGINE_KWARGS}.vllm", _ENGINE_KWARGS, _USES_VLLM, _VLLM),
    PassedOn(f"{_ENGINE_KWARGS}.sglang", _ENGINE_KWARGS, _generates_with("sglang"), f"{ROLLOUT}.name=sglang"),
    NotNeeded(f"{_ENGINE_KWARGS}.trtllm", "it is read with TensorRT-LLM only"),
    NotNeeded(
        f"{ROLLOUT}.mode", "it selects how a generator is called; each step waits for its responses in both modes",
        ("async", "sync"),
    ),
    *(
        PassedOn(f"{ROLLOUT}.{name}", f"{_ENGINE_KWARGS}.{name}", _USES_VLLM, _VLLM)
        for name in ("enable_chunked_prefill", "cudagraph_capture_sizes", "scheduling_policy")
    ),
    NotNeeded(f"{ROLLOUT}.calculate_log_probs", "the rollout always returns its log-probs"),
    NotNeeded(f"{ROLLOUT}.logprobs_mode", "log-probs are those of the sampled distribution", ("processed_logprobs",)),
    NotNeeded(
        f"{ROLLOUT}.max_model_len", "it follows from the lengths of prompts and responses", _is_long_enough,
        "It follows from the lengths of prompts and responses. Set data.max_prompt_length and "
        "data.max_response_length, or omit the key.",
    ),
    Expanded(f"{ROLLOUT}.expert_parallel_size", {1: {}}),
    PassedOn(
        f"{ROLLOUT}.expert_parallel_size", f"{_ENGINE_KWARGS}.enable_expert_parallel", _USES_VLLM, _VLLM, value=True
    ),
    NotNeeded(f"{ROLLOUT}.moe_tensor_parallel_size", "it follows from the other parallel sizes of the rollout"),
    *(
        NotNeeded(f"{ROLLOUT}.{name}", "the ranks that remain run further generators", (1,), topics.EXPERT_SERVERS)
        for name in ("data_parallel_size", "pipeline_model_parallel_size")
    ),
    Missing(f"{ROLLOUT}.disaggregation", topics.EXPERT_SERVERS, switch="enabled"),
    Renamed(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", f"{ROLLOUT}.update_weights_bucket_megabytes"
    ),
    NotNeeded(f"{ROLLOUT}.checkpoint_engine", "weights are sent without files"),
    NotNeeded(f"{ROLLOUT}.layered_summon", "weights are gathered one after the other"),
    NotNeeded(f"{ROLLOUT}.multi_stage_wake_up", "weights and KV cache return to the device one after the other"),
    NotNeeded(f"{ROLLOUT}.skip_tokenizer_init", "the rollout receives and returns token IDs"),
    NotNeeded(f"{ROLLOUT}.disable_log_stats", "speed and memory of the rollout are metrics"),
    NotNeeded(f"{ROLLOUT}.moe_load_balance_metrics_interval", "it changes no result"),
    Renamed(f"{ROLLOUT}.enable_rollout_routing_replay", f"{ROLLOUT}.enable_return_routed_experts"),
    Renamed(f"{ROLLOUT}.load_format", f"{ROLLOUT}.load_format", values={"safetensors": "hf", "dummy": "dummy_dtensor"}),
    *(NotNeeded(f"{ROLLOUT}.{name}", "all seeds follow from trainer.seed") for name in ("seed", "full_determinism")),
    NotNeeded(f"{ROLLOUT}.nnodes", "the rollout uses the devices of the actor", (0,), _ROLLOUT_POOL),
    NotNeeded(f"{ROLLOUT}.n_gpus_per_node", "the rollout uses the devices of the actor"),
    Missing(f"{ROLLOUT}.over_sample_rate", topics.STREAM, off=(0,)),
    Missing(f"{ROLLOUT}.quantization", topics.LOW_BIT),
    Missing(f"{ROLLOUT}.quantization_config_file", topics.LOW_BIT),
    Missing(f"{ROLLOUT}.mtp", topics.MTP, switch="enable"),
    Expanded(f"{TURNS}.enable", {False: {}}, otherwise=_ENVIRONMENT),
    NotNeeded(f"{TURNS}.interaction_config_path", "an environment is a class", (), _ENVIRONMENT),
    *(Missing(f"{TURNS}.{name}", topics.TOOLS) for name in ("tool_config_path", "function_tool_path")),
    NotNeeded(f"{TURNS}.max_parallel_calls", "all calls of an answer are made"),
    NotNeeded(
        f"{TURNS}.max_user_turns", "an environment ends the episode", (),
        f"The environment ends an episode itself. Set {TURNS}.max_assistant_turns to limit the answers.",
    ),
    *(
        NotNeeded(f"{TURNS}.{name}", "the tokens of a conversation are only appended, and never rendered again")
        for name in ("use_inference_chat_template", "tokenization_sanity_check_mode")
    ),
    NotNeeded(f"{TURNS}.num_repeat_rollouts", "rollout.n is the number of episodes for each prompt"),
    *(
        NotNeeded(f"{ROLLOUT}.agent.{name}", "environments and programs are started as they are needed")
        for name in ("num_workers", "agent_loop_manager_class")
    ),
    NotNeeded(f"{ROLLOUT}.agent.default_agent_loop", _ONE_TURN, ("single_turn_agent",), _AGENT),
    *(
        NotNeeded(f"{ROLLOUT}.agent.{name}", _ONE_TURN, ({}, {"path": None, "name": None}), _AGENT)
        for name in ("agent_loop_config_path", "custom_async_server")
    ),
    Missing(f"{ROLLOUT}.profiler", topics.PROFILERS, switch="enable"),
    Missing(f"{ROLLOUT}.trace", topics.TRACES, switch="backend"),
    NotNeeded(f"{ROLLOUT}.prometheus", "trainer.logger=prometheus exports the metrics of a run"),
)  # fmt: skip

_MANAGERS: dict[Any, dict[str, Any]] = {"naive": {}, "dapo": {}, "gdpo": {}, "batch": {f"{FUNCTION}.batched": True}}
_OVERLONG = f"{REWARD}.overlong_buffer"


def _rewards(source: str) -> tuple[Row, ...]:
    """Return the rows of one of the two sections in which verl keeps its rewards."""
    return (
        NotNeeded(f"{source}.reward_manager.source", "scoring functions need no manager", ("register",)),
        *(
            Expanded(
                f"{source}.{name}", _MANAGERS, "scoring functions need no manager", otherwise=topics.REWARD_MANAGERS
            )
            for name in ("reward_manager.name", "reward_manager")
        ),
        Renamed(f"{source}.reward_kwargs.overlong_buffer_cfg", _OVERLONG),
        NotNeeded(
            f"{source}.reward_kwargs.max_resp_len",
            "the penalty ends at the response length",
            _is_response_length,
            "The overlong penalty ends at data.max_response_length. Set this key, or omit both.",
        ),
        Renamed(f"{source}.num_workers", f"{FUNCTION}.num_workers"),
        Missing(f"{source}.sandbox_fusion", topics.SANDBOX, switch="url"),
        NotNeeded(f"{source}.launch_reward_fn_async", "scoring always overlaps generation"),
    )


REWARD_ROWS: tuple[Row, ...] = (
    *_rewards("reward"),
    *_rewards("reward_model"),
    Missing("sandbox_fusion", topics.SANDBOX, switch="url"),
    Expanded(
        "reward.reward_model.enable", {True: {f"{REWARD}.enable": True, f"{FUNCTION}.name": None}},
        when=lambda tree: not any(_value(tree, f"{part}.path") for part in (FUNCTION, f"reward.{FUNCTION}")),
    ),
    Renamed("reward.reward_model.enable", f"{REWARD}.enable"),
    Renamed("reward.reward_model.model_path", f"{REWARD}.model.path"),
    *(
        NotNeeded(f"{source}.{name}", f"{REWARD}.strategy runs the model on the devices of {REWARD}.resource_pool")
        for source in ("reward.reward_model", "reward_model")
        for name in ("rollout", "enable_resource_pool", "nnodes", "n_gpus_per_node")
    ),
)  # fmt: skip

DATA_ROWS: tuple[Row, ...] = (
    Missing("data.image_key", topics.IMAGES),
    Missing("data.video_key", topics.VIDEO),
    Missing("data.audio_key", topics.VIDEO),
    Missing("data.custom_cls", topics.DATASETS, switch="path"),
    Missing("data.sampler", topics.DATASETS, switch="class_path"),
    Missing("data.datagen", topics.DATASETS, switch="path"),
    Missing("data.tool_config_path", topics.TOOLS),
    Missing("data.function_tool_path", topics.TOOLS),
    *(
        NotNeeded(f"data.{name}", "it changes no result")
        for name in (
            "dataloader_num_workers", "use_shm", "return_full_prompt",
            "validation_shuffle",
        )
    ),
    *(
        NotNeeded(f"data.{name}", "prompts are text")
        for name in ("image_patch_size", "return_multi_modal_inputs", "mm_processor_kwargs")
    ),
)  # fmt: skip

RUN_ROWS: tuple[Row, ...] = (
    NotNeeded("trainer.balance_batch", "micro-batches that are limited by tokens are balanced on each rank"),
    NotNeeded(
        "trainer.resume_from_path", "the run resumes from its own folder in checkpoints",
        ("checkpoints", "checkpoints/"),
    ),
    NotNeeded("trainer.del_local_ckpt_after_load", "checkpoints are kept", (False,)),
    *(
        NotNeeded(f"trainer.{name}", "it changes no result")
        for name in ("esi_redundant_time", "ray_wait_register_center_timeout", "use_v1")
    ),
    Missing(
        "trainer.device", topics.NPU, only=("npu",),
        when=lambda tree: _value(tree, f"{ROLLOUT}.name") in ("vllm", "server", "sglang"),
    ),
    Missing("trainer.logger", topics.TRACES, only=("rl_insight",)),
    NotNeeded(f"{RAY}.py_executable", "the workers use the Python of the driver", ()),
    NotNeeded(f"{RAY}.env_vars.TRANSFER_QUEUE_ENABLE", "the controller moves the batches"),
    NotNeeded("transfer_queue", "the controller moves the batches"),
    Missing("ray_kwargs.timeline_json_file", topics.PROFILERS),
    Missing("global_profiler", topics.PROFILERS, switch="steps"),
    Missing("distillation", topics.DISTILLATION, switch="enabled"),
    Renamed(
        "algorithm.adv_estimator", "algorithm.adv_estimator",
        values={"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
    ),
    Missing("algorithm.use_pf_ppo", topics.PF_PPO),
    NotNeeded("algorithm.pf_ppo", "it is read with use_pf_ppo only"),
    NotNeeded(
        "algorithm.filter_groups.max_inflight_gen_batches", "one batch is generated at a time", (1,), topics.STREAM
    ),
)  # fmt: skip

_BOUND = "Set async_training.max_staleness=1, or more: the rollout is at most as many versions behind the trainer."
_SAMPLER = "trainer.v1.sampler"

ASYNC_ROWS: tuple[Row, ...] = (
    Expanded(
        "async_training.staleness_threshold", {0: {"async_training.max_staleness": 0}},
        "other values are refused: they are shares of the samples, and `max_staleness` is a number of versions",
        otherwise=f"This is a share of the samples of a step. {_BOUND}",
    ),
    Expanded(
        "async_training.trigger_parameter_sync_step", {1: {}}, "the weights are published after each step",
        otherwise="The weights are published after each step. Omit the key, and set data.train_batch_size to the "
        "prompts of a step.",
    ),
    NotNeeded(
        "async_training.require_batches", "a step learns one batch", (1,),
        "A step learns one batch. Omit the key, and set data.train_batch_size to the prompts of a step.",
    ),
    Missing("async_training.partial_rollout", topics.STREAM),
    Expanded(
        "async_training.use_rollout_log_probs",
        {True: {"algorithm.rollout_correction.bypass_mode": True}, False: {}},
    ),
    Expanded("trainer.v1.trainer_mode", {"sync": {}}, otherwise=f"Batches are generated whole. {_BOUND}"),
    Expanded(
        f"{_SAMPLER}.max_off_policy_threshold", {}, "`max_staleness`; nothing is generated that would be older",
        otherwise=f"Nothing is generated that would be too old. {_BOUND}",
    ),
    NotNeeded(
        f"{_SAMPLER}.max_off_policy_strategy", "nothing is generated that would be too old", ("drop", "wait"),
    ),
)  # fmt: skip

TABLES: dict[str, tuple[Row, ...]] = {
    "Data": DATA_ROWS,
    "Model": MODEL_ROWS,
    "Roles": (*ACTOR_ROWS, *REF_ROWS),
    "Engine": (*_optimizer(ACTOR, f"{ACTOR}.fsdp_config"), *_engine(ACTOR, f"{ACTOR}.fsdp_config")),
    "Megatron": _megatron(ACTOR, f"{ACTOR}.fsdp_config"),
    "Rollout": ROLLOUT_ROWS,
    "Rewards": REWARD_ROWS,
    "Run": RUN_ROWS,
    "Asynchronous training": ASYNC_ROWS,
}
"""Rows by section of docs/from-verl.md, in the order in which they apply."""

VERL: tuple[Row, ...] = (
    *(row for rows in TABLES.values() for row in rows),
    *_engine(REF, f"{REF}.fsdp_config"),
    *_megatron(REF, f"{REF}.fsdp_config"),
    *_optimizer(CRITIC, f"{CRITIC}.model.fsdp_config"),
    *_engine(CRITIC, f"{CRITIC}.model.fsdp_config", f"{CRITIC}.fsdp"),
    *_megatron(CRITIC, f"{CRITIC}.model.fsdp_config"),
)
"""All rows. Those of the engine and of Megatron are the same for all roles."""
