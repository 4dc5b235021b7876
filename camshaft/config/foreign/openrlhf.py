"""Options of OpenRLHF, and what stands for them here. Like the arguments of TRL (`trl.py`), they are not applied."""

from camshaft.config.foreign import topics
from camshaft.config.foreign.rows import Expanded, Missing, NotNeeded, Renamed, Row

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"

OPENRLHF: tuple[Row, ...] = (
    Renamed("pretrain", "model"),
    Renamed("reward_pretrain", "reward_model.model.path"),
    Renamed("critic_pretrain", "critic.model.path"),
    Renamed("prompt_data", "data"),
    Renamed("eval_dataset_path", "val_data"),
    Renamed("dataset", "data"),
    Expanded(
        "remote_rm_url",
        {},
        "set reward=my_reward.py, with an async function that calls the server; see docs/rewards.md",
    ),
    Renamed("advantage_estimator", "algorithm"),
    Renamed("input_key", "data.prompt_key"),
    Renamed("label_key", "data.reward_fn_key"),
    Expanded("apply_chat_template", {True: {}}, "messages are always formatted with the chat template"),
    Renamed("prompt_max_len", "prompt_length"),
    Renamed("generate_max_len", "response_length"),
    Renamed("max_len", "max_length"),
    Renamed("save_path", "out"),
    Renamed("ckpt_path", "out"),
    Renamed("n_samples_per_prompt", "n"),
    Renamed("rollout_batch_size", "batch"),
    Renamed("train_batch_size", "batch"),
    Renamed("micro_train_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    Renamed("micro_rollout_batch_size", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    Renamed("actor_learning_rate", "lr"),
    Renamed("critic_learning_rate", "critic.optim.lr"),
    Renamed("init_kl_coef", "algorithm.kl_ctrl.kl_coef"),
    Renamed("kl_target", "algorithm.kl_ctrl.target_kl"),
    Renamed("use_kl_loss", f"{ACTOR}.use_kl_loss"),
    Renamed("eps_clip", f"{ACTOR}.clip_ratio"),
    Renamed("eps_clip_low_high", f"{ACTOR}.clip_ratio_high"),
    Renamed("value_clip", "critic.cliprange_value"),
    Renamed("gamma", "algorithm.gamma"),
    Renamed("lambd", "algorithm.lam"),
    Renamed("entropy_loss_coef", f"{ACTOR}.entropy_coeff"),
    Renamed("num_episodes", "epochs"),
    Renamed("max_epochs", f"{ACTOR}.ppo_epochs"),
    Renamed("lora_rank", "lora"),
    Renamed("actor_num_gpus_per_node", "devices"),
    Renamed("actor_num_nodes", "trainer.nnodes"),
    Renamed("use_wandb", "trainer.logger"),
    Renamed("dynamic_filtering", "algorithm.filter_groups.enable"),
    Renamed("enable_vllm_is_correction", "algorithm.rollout_correction.rollout_is"),
    Renamed("ring_attn_size", f"{ACTOR}.ulysses_sequence_parallel_size"),
    NotNeeded("colocate_all_models", "all roles share the devices of a run"),
    NotNeeded("packing_samples", "batches are never padded"),
    NotNeeded("vllm_sync_backend", "the rollout chooses the transport of weights"),
    NotNeeded("flash_attn", "the engine chooses the attention kernel"),
    Expanded("async_train", {True: {"max_staleness": 1}, False: {}}),
    Renamed("agent_func_path", "agent", "a function with `base_url` and `api_key`, as `file.py:function`"),
    Missing("zero_stage", topics.DEEPSPEED),
)

SUPERVISED: tuple[Row, ...] = (
    Renamed("micro_train_batch_size", "data.micro_batch_size_per_gpu"),
    Renamed("max_epochs", "epochs"),
)
"""Rows that differ in `camshaft sft` and `camshaft rm`."""
