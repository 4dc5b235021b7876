"""A config key is written by name in few files."""

import statistics

from architecture.homes import find_homes
from architecture.source import PACKAGE, ROOT, package, parse

MEDIAN = 3
"""Median number of homes of a key."""
ABOVE_FOUR = 61
"""Number of keys with more than four homes. It only falls."""
ABOVE_THREE = """
    activation_offload actor_rollout_ref adv_estimator async_save best_metric bypass_mode clip_ratio
    custom_reward_function default_local_dir enable_gradient_checkpointing enable_prefix_caching
    enable_return_routed_experts enforce_eager engine_kwargs exclude_modules experiment_name external_lib
    filter_groups forward_max_token_len_per_gpu free_cache_engine frequency_penalty fsdp_config
    gpu_memory_utilization grad_clip grad_offload gradient_checkpointing_mode ignore_eos input_tokenizer load_format
    log_prob_micro_batch_size lora_adapter_path lora_rank loss_agg_mode loss_mode lr_scheduler_type lr_warmup_steps
    max_ckpt_to_keep max_length max_num_batched_tokens max_num_seqs max_prompt_length micro_batch_size min_p
    mixed_precision model_dtype offload_policy optimizer_offload output_path override_config param_dtype
    param_offload policy_loss ppo_epochs ppo_max_token_len_per_gpu ppo_micro_batch_size ppo_mini_batch_size
    presence_penalty prompt_key prompt_length random_init ray_kwargs reduce_dtype repetition_penalty resource_pool
    response_key response_length reward_model rollout_correction router_aux_loss_coef save_freq stop_token_ids
    target_modules tensor_model_parallel_size tensor_parallel_size test_freq tokenizer_path top_k top_p total_epochs
    total_training_steps train_batch_size train_files trust_remote_code ulysses_sequence_parallel_size
    update_weights_bucket_megabytes use_dynamic_bsz use_prefix_grouper use_torch_compile val_files val_kwargs
    weight_decay worker_cls
"""
"""Keys with more than three homes. A new key has at most three."""

SCHEMA = '''
class ActorConfig:
    """The actor, with use_kl_loss."""

    use_kl_loss: bool = key(False, "Add use_kl_loss to the loss.")
    lr: float = key(1e-6, "Learning rate.")
'''


def test_keys_have_few_homes() -> None:
    homes = find_homes(package())
    counts = {name: len(files) for name, files in homes.items()}
    assert statistics.median(counts.values()) <= MEDIAN
    assert sum(count > 4 for count in counts.values()) <= ABOVE_FOUR
    new = {name: homes[name] for name, count in counts.items() if count > 3 and name not in ABOVE_THREE.split()}
    assert not new, new


def test_defaults_are_in_the_schema_only() -> None:
    assert not list((ROOT / PACKAGE).rglob("*.yaml"))


def test_a_home_writes_the_name_of_a_key() -> None:
    modules = parse(
        config__schema__roles=SCHEMA,
        config__auto='RULES = {"actor.use_kl_loss": rule}',
        config__derive="engine_config(use_kl_loss=True)",
        config__checks='"use_kl_loss requires a reference model"',
        roles__actor='"""The role, with use_kl_loss."""\nloss(config.use_kl_loss, use_kl_loss=True)',
        trainer__ppo='keys = ("use_kl_loss",)',
    )
    assert find_homes(modules) == {
        "use_kl_loss": {"config.schema.roles", "config.auto", "config.derive", "trainer.ppo"}
    }
