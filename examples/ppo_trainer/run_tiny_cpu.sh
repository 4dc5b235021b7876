#!/usr/bin/env bash
# PPO with a critic on the CPU: creates a tiny model and an addition task in ./tiny, then trains on it.
set -x

python3 - <<'MAKE' || exit
from camshaft.data import write_arithmetic
from camshaft.models.tiny import make_tiny_model

make_tiny_model("tiny/model")
write_arithmetic("tiny/sums", num_train=256, num_heldout=32)
MAKE
python3 -m camshaft.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files=tiny/sums/train.parquet \
    data.val_files=tiny/sums/heldout.parquet \
    data.train_batch_size=32 \
    data.max_prompt_length=16 \
    data.max_response_length=8 \
    actor_rollout_ref.model.path=tiny/model \
    actor_rollout_ref.actor.strategy=reference \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.name=torch \
    actor_rollout_ref.rollout.dtype=float32 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    critic.model.path=tiny/model \
    critic.optim.lr=1e-3 \
    critic.ppo_micro_batch_size_per_gpu=32 \
    trainer.logger='["console","jsonl"]' \
    trainer.project_name='camshaft_examples' \
    trainer.experiment_name='tiny' \
    trainer.device=cpu \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.save_freq=5 \
    trainer.test_freq=5 \
    trainer.total_epochs=10 \
    trainer.total_training_steps=10 \
    "$@"
