#!/usr/bin/env bash
# Supervised fine-tuning on GSM8K before RL: a 0.5B model on one GPU with at least 16 GB. The data files have the columns
# `prompt` and `response`. The trained model is in the subfolder `huggingface` of the run folder.
# Download the model first:  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir ~/models/Qwen2.5-0.5B-Instruct
set -x

python3 -m camshaft.trainer.main_sft \
    data.train_files="$HOME/data/gsm8k/sft_train.parquet" \
    data.val_files="$HOME/data/gsm8k/sft_test.parquet" \
    data.train_batch_size=128 \
    data.max_length=1024 \
    data.truncation=right \
    data.use_dynamic_bsz=True \
    data.max_token_len_per_gpu=8192 \
    model.path="$HOME/models/Qwen2.5-0.5B-Instruct" \
    model.enable_gradient_checkpointing=True \
    optim.lr=1e-5 \
    fsdp_config.mixed_precision.param_dtype=bfloat16 \
    trainer.logger='["console","jsonl"]' \
    trainer.project_name='camshaft_examples' \
    trainer.experiment_name='qwen2.5_0.5b_sft' \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.test_freq=20 \
    trainer.total_epochs=3 \
    "$@"
