#!/usr/bin/env bash
# PPO with a reward model (a sequence classifier with one label) on the prompts of Anthropic HH, on one GPU.
# The reward model has a different tokenizer and chat template, so responses are re-tokenized (docs/reward_model.md).
# Download the model first:  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir ~/models/Qwen2.5-0.5B-Instruct
set -x

python3 -m camshaft.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$HOME/data/full_hh_rlhf/rl/train.parquet" \
    data.val_files="$HOME/data/full_hh_rlhf/rl/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path="$HOME/models/Qwen2.5-0.5B-Instruct" \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    critic.model.path="$HOME/models/Qwen2.5-0.5B-Instruct" \
    critic.model.enable_gradient_checkpointing=True \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=8 \
    reward_model.enable=True \
    reward_model.model.path="$HOME/models/reward_model" \
    reward_model.micro_batch_size_per_gpu=8 \
    custom_reward_function.name=null \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.01 \
    trainer.logger='["console","jsonl"]' \
    trainer.project_name='camshaft_examples' \
    trainer.experiment_name='qwen2.5_0.5b_hh' \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
