"""Arguments of TRL's trainers and configs (TRL 1.16), and what stands for them here.

A short name stands for the key that it has in the command. Units and defaults differ, so the arguments are not applied:
an error names the key to type (`answers.py`).
"""

from camshaft.config.foreign import topics
from camshaft.config.foreign.rows import Expanded, Missing, NotNeeded, Renamed, Row

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
AGGREGATION, LOSS = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"

TRAINER: tuple[Row, ...] = (
    Renamed("model_name_or_path", "model", "folder, or name of a model; the argument `model` of Python"),
    Renamed("processing_class", "data.tokenizer", "default: the tokenizer of the model"),
    Renamed(
        "reward_funcs",
        "reward",
        "file and function, or a list; a reward model is `reward_model.model.path`. A function with a parameter "
        "`environments` is called once for each episode, with lists of one",
    ),
    Renamed("reward_processing_classes", "reward_model.model.input_tokenizer"),
    Renamed("reward_weights", "custom_reward_function.weights", "`reward_model.weight` for a reward model beside them"),
    Renamed("train_dataset", "data", "parquet, JSON lines, JSON, CSV, Arrow, or a folder of `datasets`"),
    Renamed("dataset_name", "data", "with the split: `openai/gsm8k:train`"),
    Renamed("chat_template_path", "data.chat_template"),
    Renamed("eval_dataset", "val_data"),
    Renamed("peft_config", "lora", "requires PEFT: the extra `lora`"),
    Renamed("lora_r", "lora"),
    Renamed("lora_alpha", f"{MODEL}.lora_alpha"),
    Renamed("lora_target_modules", f"{MODEL}.target_modules"),
    NotNeeded("remove_unused_columns", "scoring functions receive all columns"),
    NotNeeded("model_init_kwargs", "the dtype is that of `fsdp_config`, and `override_config` changes config.json"),
    Renamed("rollout_func", "agent", "a program for one episode, which gets `base_url` and `api_key`"),
    Renamed(
        "environment_factory", "environment",
        "unchanged: a class with tools, and `reward` or `get_reward`. With the same answers, `GRPOTrainer` and "
        "camshaft give the same transcripts, tokens and scores (`make test-agents`)",
    ),
    Renamed("max_tool_calling_iterations", "max_turns", "answers: one more than rounds of calls"),
    Missing("load_in_4bit", topics.LOW_BIT),
)  # fmt: skip

BATCH: tuple[Row, ...] = (
    Renamed(
        "per_device_train_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "here it affects only memory and speed; in TRL, also the batch size",
    ),
    Renamed(
        "gradient_accumulation_steps", f"{ACTOR}.ppo_mini_batch_size",
        "prompts per optimizer step; the number of micro-batches follows from it",
    ),
    Renamed("generation_batch_size", "batch", "prompts per step here, completions in TRL"),
    Renamed(
        "steps_per_generation", f"{ACTOR}.ppo_mini_batch_size",
        "the batch divided by the mini-batch is `steps_per_generation` / `gradient_accumulation_steps`",
    ),
    Renamed("num_generations", "n"),
    Renamed("num_generations_eval", f"{ROLLOUT}.val_kwargs.n"),
    Renamed("num_iterations", f"{ACTOR}.ppo_epochs"),
    Renamed("num_ppo_epochs", f"{ACTOR}.ppo_epochs"),
    Renamed("max_completion_length", "response_length"),
    Renamed("max_prompt_length", "prompt_length"),
    Renamed("max_seq_length", "max_length", "of `camshaft sft`"),
    Renamed(
        "max_steps", "steps",
        "a step generates once and can contain several optimizer steps, which TRL counts; as in TRL, steps lift the "
        "limit of epochs, unless `trainer.total_epochs` is set too",
    ),
    Renamed("num_train_epochs", "epochs"),
    Renamed("shuffle_dataset", "data.shuffle"),
    NotNeeded("packing", "batches are never padded"),
    NotNeeded("padding_free", "batches are never padded"),
    NotNeeded("assistant_only_loss", "only responses are trained on"),
    NotNeeded("completion_only_loss", "only responses are trained on"),
    NotNeeded("auto_find_batch_size", "memory is forecast by `camshaft plan`"),
    NotNeeded("dataloader_num_workers", "the data is in memory"),
)  # fmt: skip

SAMPLING: tuple[Row, ...] = (
    Renamed("temperature", f"{ROLLOUT}.temperature"),
    Renamed("top_p", f"{ROLLOUT}.top_p"),
    Renamed("top_k", f"{ROLLOUT}.top_k", "off at -1 and at 0"),
    Renamed("min_p", f"{ROLLOUT}.min_p"),
    Renamed("repetition_penalty", f"{ROLLOUT}.repetition_penalty"),
    Expanded("use_vllm", {True: {"rollout": "vllm"}, False: {"rollout": "torch"}}),
    Expanded("vllm_mode", {"server": {"rollout": "server"}, "colocate": {"rollout": "vllm"}}),
    Renamed("vllm_server_base_url", f"{ROLLOUT}.engine_kwargs", "the key `vllm_server_base_url` of it"),
    Renamed("vllm_gpu_memory_utilization", f"{ROLLOUT}.gpu_memory_utilization"),
    Renamed("vllm_tensor_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"),
    Renamed("vllm_enable_sleep_mode", f"{ROLLOUT}.free_cache_engine"),
    NotNeeded("vllm_max_model_length", "it follows from the lengths of prompts and responses"),
    NotNeeded("vllm_model_impl", "the rollout chooses its implementation of the model"),
    NotNeeded("ds3_gather_for_generation", "weights are sent one at a time"),
    NotNeeded("use_transformers_paged", "the rollout `torch` batches continuously"),
    NotNeeded("cache_implementation", "the rollout chooses its cache"),
)  # fmt: skip

LOSSES: tuple[Row, ...] = (
    Renamed(
        "beta", f"{ACTOR}.kl_loss_coef",
        f"with `{ACTOR}.use_kl_loss`; 0 in TRL means no reference model: leave `use_kl_loss` off",
    ),
    Renamed("kl_coef", "algorithm.kl_ctrl.kl_coef", "with `algorithm.use_kl_in_reward`"),
    Renamed("epsilon", f"{ACTOR}.clip_ratio"),
    Renamed("epsilon_high", f"{ACTOR}.clip_ratio_high"),
    Renamed("cliprange", f"{ACTOR}.clip_ratio"),
    Renamed("cliprange_value", "critic.cliprange_value"),
    Renamed("delta", f"{ACTOR}.clip_ratio_c", "`delta` bounds the ratio for any loss; this is dual clip"),
    Expanded(
        "loss_type",
        {
            "grpo": {AGGREGATION: "seq-mean-token-mean"}, "dapo": {AGGREGATION: "token-mean"},
            "bnpo": {AGGREGATION: "token-mean"}, "dr_grpo": {AGGREGATION: "seq-mean-token-sum-norm"},
            "cispo": {LOSS: "cispo"},
        },
        "TRL's default is dapo",
    ),
    Expanded("importance_sampling_level", {"sequence": {LOSS: "gspo"}, "token": {LOSS: "vanilla"}}),
    Expanded(
        "scale_rewards",
        {
            "none": {"algorithm.norm_adv_by_std_in_grpo": False}, False: {"algorithm.norm_adv_by_std_in_grpo": False},
            "group": {"algorithm.norm_adv_by_std_in_grpo": True},
        },
        otherwise="division by the standard deviation of the batch is algorithm=reinforce_plus_plus_baseline",
    ),
    Renamed("entropy_coef", f"{ACTOR}.entropy_coeff"),
    Expanded(
        "mask_truncated_completions", {False: {}},
        "truncated responses are not masked; reward_model.overlong_buffer.enable=true lowers their reward instead",
    ),
    Renamed(
        "vllm_importance_sampling_correction", f"{CORRECTION}.rollout_is",
        "off by default; in TRL it is on with vLLM",
    ),
    Renamed("vllm_importance_sampling_mode", f"{CORRECTION}.rollout_is"),
    Renamed("vllm_importance_sampling_clip_max", f"{CORRECTION}.rollout_is_threshold"),
    Renamed("vllm_importance_sampling_cap", f"{CORRECTION}.rollout_is_threshold"),
    Renamed("router_aux_loss_coef", f"{MODEL}.router_aux_loss_coef"),
    NotNeeded("use_liger_kernel", "log-probs and entropy are always computed without materialized logits"),
    NotNeeded("disable_dropout", "dropout is that of config.json, and a run with dropout says so"),
    Missing("sync_ref_model", topics.SYNC_REF),
)  # fmt: skip

OPTIMIZER: tuple[Row, ...] = (
    Renamed("learning_rate", "lr", "1e-6 in both"),
    Renamed("lr_scheduler_type", f"{ACTOR}.optim.lr_scheduler_type", "TRL decays linearly by default, camshaft not"),
    Renamed("warmup_ratio", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    Renamed("warmup_steps", f"{ACTOR}.optim.lr_warmup_steps"),
    Renamed("weight_decay", f"{ACTOR}.optim.weight_decay"),
    Renamed("max_grad_norm", f"{ACTOR}.grad_clip"),
    Renamed("optim", f"{ACTOR}.optim.optimizer"),
    Renamed("gradient_checkpointing", f"{MODEL}.enable_gradient_checkpointing"),
    Expanded(
        "bf16", {True: {f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "bfloat16"}}, "master weights stay float32"
    ),
    Expanded("use_cpu", {True: {"device": "cpu"}}),
    Expanded("fsdp", {}, "set `engine=fsdp`, the default on GPUs"),
    Missing("deepspeed", topics.DEEPSPEED),
)  # fmt: skip

LOGS: tuple[Row, ...] = (
    Renamed("output_dir", "out"),
    Renamed("run_name", "trainer.experiment_name"),
    Renamed("report_to", "trainer.logger", "console, jsonl, tensorboard, wandb, mlflow, trackio, prometheus"),
    Renamed("save_steps", "trainer.save_freq"),
    Renamed("save_total_limit", "trainer.max_actor_ckpt_to_keep"),
    Renamed("eval_steps", "trainer.test_freq"),
    Renamed("log_completions", "trainer.rollout_data_dir", "the run folder contains responses in any case"),
    Renamed("metric_for_best_model", "trainer.best_metric", "the best step is kept and can be exported"),
    Renamed("resume_from_checkpoint", "out", "a run resumes if its folder is named again"),
    NotNeeded("logging_steps", "every step is logged"),
    NotNeeded("eval_strategy", "a run with validation data validates"),
    NotNeeded("save_strategy", "checkpoints follow `trainer.save_freq`"),
    NotNeeded("load_best_model_at_end", "the best step is kept beside the last one"),
    Missing("push_to_hub", topics.HUB_PUSH),
)  # fmt: skip

ASYNC: tuple[Row, ...] = (
    Renamed("max_staleness", "max_staleness", "TRL drops older rows; here none is generated that would be older"),
    NotNeeded("weight_sync_steps", "the weights are published after each step"),
    NotNeeded("max_inflight_tasks", "`max_staleness` + 1 batches are generated ahead"),
    NotNeeded("queue_maxsize", "`max_staleness` + 1 batches are generated ahead"),
)

TRL: dict[str, tuple[Row, ...]] = {
    "Arguments of the trainer": TRAINER,
    "Batch and length": BATCH,
    "Sampling": SAMPLING,
    "Loss": LOSSES,
    "Optimizer": OPTIMIZER,
    "Logs and files": LOGS,
    "Asynchronous training": ASYNC,
}
"""Rows by section of docs/from-trl.md."""

SUPERVISED: tuple[Row, ...] = (
    Renamed("per_device_train_batch_size", "data.micro_batch_size_per_gpu"),
    Renamed("gradient_accumulation_steps", "data.train_batch_size"),
    Renamed("save_total_limit", "trainer.max_ckpt_to_keep"),
    Renamed("max_prompt_length", "max_length"),
    *(Renamed(name, "model") for name in ("partial_pretrain", "model.partial_pretrain")),
    *(
        Expanded(name, {}, "conversations of several turns are read from the column messages")
        for name in ("data.multiturn", "data.messages_key")
    ),
    *(Renamed(name, "fsdp_config.tensor_parallel_size") for name in ("tp", "tensor_parallel", "tensor_parallel_size")),
)
"""Rows that differ in `camshaft sft` and `camshaft rm`."""
