"""Words that people type for a key without knowing its name. They are answered, but not applied."""

from camshaft.config.foreign.rows import Expanded, NotNeeded, Renamed, Row

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
DTYPE = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"

WORDS: tuple[Row, ...] = (
    *(Renamed(name, "devices") for name in ("gpus", "num_gpus", "n_gpus", "num_processes", "nproc_per_node")),
    *(Renamed(name, "trainer.nnodes") for name in ("nodes", "num_nodes", "num_machines")),
    Renamed("batch_size", "batch"),
    Renamed("micro_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    Renamed("mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
    Renamed("gradient_accumulation", f"{ACTOR}.ppo_mini_batch_size"),
    *(Renamed(name, "response_length") for name in ("max_tokens", "max_new_tokens", "max_response_length")),
    *(Renamed(name, "n") for name in ("group_size", "num_samples", "rollouts_per_prompt")),
    *(Renamed(name, "out") for name in ("checkpoint_dir", "save_dir", "log_dir", "run_dir")),
    *(Renamed(name, "trainer.save_freq") for name in ("save_every", "save_interval", "checkpoint_every")),
    *(Renamed(name, "trainer.test_freq") for name in ("eval_every", "eval_interval", "eval_freq")),
    *(Renamed(name, "trainer.logger") for name in ("wandb", "tensorboard", "mlflow", "tracker")),
    Renamed("kl", f"{ACTOR}.kl_loss_coef"),
    Renamed("entropy", f"{ACTOR}.entropy_coeff"),
    Renamed("clip", f"{ACTOR}.clip_ratio"),
    Renamed("optimizer", f"{ACTOR}.optim.optimizer"),
    *(Renamed(name, DTYPE) for name in ("precision", "mixed_precision", "amp")),
    Expanded("fp16", {}, f"computation in float16 is not supported; set {DTYPE}=bfloat16"),
    *(Renamed(name, f"{ACTOR}.fsdp_config.param_offload") for name in ("offload", "cpu_offload")),
    Renamed("use_lora", "lora"),
    *(Renamed(name, "environment") for name in ("env", "envs", "environments", "env_name", "env_id", "gym")),
    *(Renamed(name, "agent") for name in ("agent_func", "agent_loop", "agents", "program", "harness")),
    *(
        Expanded(name, {}, "set agent=file.py:function, or environment=file.py:Class, that uses it; see docs/agents.md")
        for name in ("verifiers", "openenv", "mcp")
    ),
    Expanded("lora_dropout", {0: {}}, "adapters have no dropout; omit the key"),
    *(
        Expanded(name, {}, "set on_step=my_hooks.py:function, which each step calls; see docs/add-a-metric.md")
        for name in ("callbacks", "callback", "early_stopping_patience")
    ),
    *(
        Expanded(name, {}, f"set chat_template_kwargs={{{name}: ...}}, the arguments of the chat template")
        for name in ("enable_thinking", "reasoning_effort")
    ),
    *(
        NotNeeded(name, "the engine chooses the attention kernel")
        for name in ("flash_attention", "use_flash_attn", "attn_implementation")
    ),
    *(
        Expanded(
            name, {},
            f"set {ROLLOUT}.tensor_model_parallel_size for the rollout, and {ACTOR}.fsdp_config.tensor_parallel_size, "
            "or with engine=megatron engine_kwargs.tensor_model_parallel_size, for the actor",
        )
        for name in ("tp", "tensor_parallel", "tensor_parallel_size")
    ),
    *(
        Expanded(name, {}, f"set {ACTOR}.engine_kwargs.{option} with engine=megatron")
        for names, option in {
            ("pp", "pipeline_parallel", "pipeline_parallel_size"): "pipeline_model_parallel_size",
            ("ep", "expert_parallel", "expert_parallel_size"): "expert_model_parallel_size",
        }.items()
        for name in names
    ),
    *(
        Expanded(name, {}, f"set {ACTOR}.ulysses_sequence_parallel_size")
        for name in ("sp", "cp", "sequence_parallel_size", "context_parallel_size")
    ),
    *(
        Expanded(name, {}, "a run resumes if its command is repeated with the same out=<folder>")
        for name in ("resume", "resume_from")
    ),
    *(
        Expanded(name, {}, "the reference is the model that the run starts from")
        for name in ("ref_model", "reference_model")
    ),
    *(Renamed(name, "model") for name in ("base_model", "model_id")),
    *(
        Renamed(name, "max_length")
        for name in ("cutoff_len", "sequence_len", "seq_len", "model_max_length", "block_size", "max_sequence_length")
    ),
    *(Renamed(name, "val_data") for name in ("val_set_size", "validation_split", "test_datasets")),
    *(Renamed(name, "seed") for name in ("random_state", "data_seed")),
    *(Renamed(name, "trainer.project_name") for name in ("wandb_project", "project")),
    *(
        NotNeeded(name, why)
        for why, names in {
            "batches are never padded": ("sample_packing", "eval_sample_packing", "neat_packing"),
            "only responses are trained on": ("train_on_inputs", "train_on_prompt", "mask_prompt"),
            "the command says it": ("do_train", "stage", "task_type"),
            "data is tokenized once, and cached": ("preprocessing_num_workers", "dataset_num_proc"),
        }.items()
        for name in names
    ),
    NotNeeded("full_finetuning", "all weights are trained unless lora is set"),
    NotNeeded("overwrite_output_dir", "a run without out=FOLDER gets a new folder"),
    Renamed("model.path", "model"),
    *(Renamed(name, "engine") for name in ("strategy", "actor.strategy", "model.strategy")),
    *(Renamed(name, "algorithm.lam") for name in ("gae_lambda", "lam", "lambda")),
    Renamed("temp", f"{ROLLOUT}.temperature"),
    *(Renamed(name, "data.tokenizer") for name in ("tokenizer", "tokenizer_name", "tokenizer_name_or_path")),
    NotNeeded("max_model_len", "it follows from prompt_length and response_length"),
    Expanded("kv_cache_dtype", {}, f"set {ROLLOUT}.engine_kwargs.kv_cache_dtype with rollout=vllm"),
    *(Expanded(name, {}, "set the environment variable WANDB_API_KEY") for name in ("wandb_api_key", "wandb_key")),
    NotNeeded("use_unsloth", "camshaft has kernels of its own"),
    *(
        Expanded(name, {"lora": {"lora": 16}, "full": {}, "freeze": {}}, "without lora all weights are trained")
        for name in ("finetuning_type", "adapter", "train_type")
    ),
    Expanded("fast_inference", {True: {"rollout": "vllm"}, False: {"rollout": "torch"}}),
    Expanded("lora_target_linear", {True: {f"{MODEL}.target_modules": "all-linear"}}),
    *(
        Expanded(name, {}, "the chat template is that of the tokenizer; set data.chat_template=FILE for another one")
        for name in ("template", "chat_template", "conversation_template")
    ),
    *(
        Expanded(
            name, {},
            "a section of prime-rl, whose trainer, orchestrator and inference server are separate programs; camshaft "
            "ppo --help lists the most common keys",
        )
        for name in ("orchestrator", "inference")
    ),
    *(
        Renamed(name, "max_staleness")
        for name in (
            "max_head_offpolicyness", "rollout.max_head_offpolicyness", "max_off_policy_steps", "max_steps_off_policy",
            "max_staleness_steps", "max_trajectory_age_steps", "staleness", "staleness_threshold", "off_policy_steps",
        )
    ),
    *(
        Expanded(name, {}, "recompute is rollout_is=token, and loglinear is loss_type=interpolated; see docs/async.md")
        for name in ("prox_logp_method", "actor.prox_logp_method")
    ),
    NotNeeded("trigger_parameter_sync_step", "the weights are published after each step"),
    Expanded("system_prompt", {}, "put a message with the role system into the prompts of the data"),
)  # fmt: skip
