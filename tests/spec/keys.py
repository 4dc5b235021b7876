"""Every key of an RL run, with the tests that fail if the key does nothing.

    tests_of_key("critic.optim.lr")       # it reaches the engine, and the engine uses it

Keys that set a field of an engine, a rollout or its sampling are in `fields.py`, all others here. `mutate.py` disables
each key and checks that one of these tests fails.
"""

from __future__ import annotations

from spec.fields import ACTOR, CRITIC, FIELD_TESTS, FIELDS, MODEL, REWARD, ROLLOUT

REACHES = "tests/spec/test_fields.py::test_key_reaches_its_field"
_DATA, _RUN, _PLACE = (f"tests/spec/test_{name}_keys.py" for name in ("data", "run", "place"))
_TURNS = f"{ROLLOUT}.multi_turn"
_EPISODES, _PLAY = "tests/unit/trainer/test_episodes.py", "tests/unit/agents/test_play.py"
_AGENTS, _TOOLS = "tests/unit/trainer/test_agents.py", "tests/unit/trainer/test_tool_runs.py"
_LIMITS = f"{_EPISODES}::test_key_reaches_the_limits"
_REWARDS = "tests/spec/test_reward_keys.py"
_DIVERGENCE = "tests/unit/trainer/test_divergence.py"
_IDLE = "tests/unit/trainer/test_idle.py"
_PARITY = "tests/parity/test_parity.py"
_RELATIVES = f"{_PARITY}::test_grpo_variants_match_the_reference_program"
_PPO = f"{_PARITY}::test_ten_steps_of_ppo_match_the_reference_program"
_GRPO = f"{_PARITY}::test_grpo_with_a_kl_loss_matches_the_reference_program"
_ADAPTIVE = f"{_PARITY}::test_adaptive_kl_controller_matches_the_reference_program"
_ALGORITHMS = "tests/unit/config/test_algorithms.py"
_CHECKS, _RESUME = "tests/unit/config/test_checks.py", "tests/smoke/test_resume.py"
_CORRECTION = "tests/unit/trainer/test_correction.py"
_NOTICE = f"{_PLACE}::test_key_without_effect_is_a_warning"
_HF_MODEL = "tests/smoke/test_hf_model.py::test_transformers_loads_the_weights_of_the_checkpoint"
_SCORED = "tests/smoke/test_reward_model.py"
_DYNAMIC, _PPO_UNIT = (f"tests/unit/trainer/test_{name}.py" for name in ("dynamic", "ppo"))
_WRITTEN = f"{_PPO_UNIT}::test_partial_validation_output_is_reported_without_a_shared_folder"
_BEST = f"{_RUN}::test_best_step_by_the_metric_is_saved"
_BUFFER = f"{REWARD}.overlong_buffer"


def _each(test: str, *keys: str) -> dict[str, tuple[str, ...]]:
    """Return a case of a parametrized test for each key."""
    return {key: (f"{test}[{key}]",) for key in keys}


PROOFS: dict[str, tuple[str, ...]] = {
    "trainer.on_step": ("tests/unit/trainer/test_session.py::test_hooks_of_the_command_line_add_metrics",),
    "trainer.samples.enable": ("tests/smoke/test_run_folder.py::test_samples_leave_all_metrics_bitwise_equal",),
    "trainer.samples.token_rows": ("tests/unit/tracking/test_samples.py::test_a_file_has_all_rows_and_values_of_few",),
    "trainer.samples.max_gb": ("tests/unit/tracking/test_samples.py::test_files_of_a_run_stay_below_the_limit",),
    # -- data
    **_each(
        f"{_DATA}::test_key_changes_the_data",
        "data.tokenizer", "data.train_files", "data.val_files", "data.prompt_key",
        "data.chat_template", "data.chat_template_kwargs", "data.prompt_template", "data.tools_key",
        "data.prompt_id_key",
        "data.max_prompt_id_length", "data.max_prompt_length", "data.truncation", "data.filter_overlong_prompts",
        "data.train_batch_size", "data.gen_batch_size", "data.return_raw_chat", "data.return_raw_input_ids",
        "data.reward_fn_key", "data.train_max_samples", "data.val_max_samples", "trainer.total_epochs",
        "trainer.total_training_steps",
    ),
    "data.filter_overlong_prompts_workers": (f"{_DATA}::test_key_is_the_number_of_tokenizing_processes",),
    **_each(f"{_DATA}::test_key_changes_the_order_of_rows", "data.shuffle", "data.seed"),
    "data.trust_remote_code": (f"{_DATA}::test_tokenizer_code_runs_only_if_trusted",),
    "data.val_batch_size": (f"{_RUN}::test_val_batch_size_is_the_size_of_validation_batches",),
    # -- actor, rollout, reference
    **_each(_NOTICE, f"{MODEL}.use_remove_padding", f"{CRITIC}.model.use_remove_padding"),
    **_each(
        f"{_RUN}::test_key_changes_the_run",
        f"{ACTOR}.shuffle", f"{ACTOR}.clip_ratio", f"{ACTOR}.kl_loss_type", f"{ACTOR}.policy_loss.tau_pos",
        f"{ACTOR}.policy_loss.tau_neg", f"{ACTOR}.policy_loss.dro_beta", f"{CRITIC}.ppo_mini_batch_size",
        f"{ACTOR}.policy_loss.clip_cov_ratio", f"{ACTOR}.policy_loss.clip_cov_lb", f"{ACTOR}.policy_loss.clip_cov_ub",
        f"{ACTOR}.policy_loss.kl_cov_ratio", f"{ACTOR}.policy_loss.ppo_kl_coef",
        f"{ACTOR}.policy_loss.top_entropy_quantile",
        f"{CRITIC}.ppo_epochs", f"{CRITIC}.shuffle", f"{CRITIC}.loss_agg_mode", "algorithm.filter_groups.enable",
        "algorithm.filter_groups.metric", "trainer.test_freq", "trainer.val_before_train", "trainer.val_only",
        "trainer.seed",
    ),
    **dict.fromkeys(
        (
            f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs", f"{ACTOR}.clip_ratio_low",
            f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio_c", f"{ACTOR}.entropy_coeff",
        ),
        (_PPO,),
    ),
    **dict.fromkeys((f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"), (_GRPO,)),
    f"{ACTOR}.loss_agg_mode": (_ADAPTIVE,),
    **dict.fromkeys(
        (f"{ACTOR}.entropy_target", f"{ACTOR}.entropy_coeff_delta", f"{ACTOR}.entropy_coeff_max"),
        ("tests/unit/trainer/test_token_selection.py::test_coefficient_rises_while_the_entropy_is_below_the_target",),
    ),
    f"{ACTOR}.entropy_coeff_min": (
        "tests/unit/trainer/test_token_selection.py::test_coefficient_is_in_the_checkpoint",
    ),
    f"{ACTOR}.router_replay.mode": (
        "tests/unit/trainer/test_router_replay.py::test_replay_uses_the_experts_of_the_rollout",
    ),
    f"{ACTOR}.policy_loss.loss_mode": (f"{_RELATIVES}[gspo]", f"{_RELATIVES}[cispo]"),
    f"{ACTOR}.checkpoint.save_contents": (_HF_MODEL,),
    f"{ROLLOUT}.name": ("tests/smoke/test_pairs.py::test_rollout_and_engine_agree_on_sampled_tokens",),
    f"{ROLLOUT}.n": ("tests/unit/trainer/test_ppo.py::test_responses_to_a_prompt_are_sampled_independently",),
    f"{ROLLOUT}.val_kwargs.n": (
        "tests/unit/trainer/test_validate.py::test_responses_to_one_question_are_held_together",
    ),
    # -- critic
    f"{CRITIC}.enable": (
        "tests/unit/config/test_algorithms.py::test_custom_estimator_has_a_critic_if_enabled",
        "tests/unit/trainer/test_own_algorithms.py::test_the_example_trains",
    ),
    f"{CRITIC}.model.tokenizer_path": (f"{_CHECKS}::test_critic_must_read_the_token_ids_of_the_actor",),
    f"{CRITIC}.cliprange_value": (_PPO,),
    f"{CRITIC}.checkpoint.save_contents": (_HF_MODEL,),
    # -- scores
    f"{REWARD}.enable": (f"{_SCORED}::test_a_model_scores_without_a_function_in_validation",),
    f"{REWARD}.max_length": (f"{_SCORED}::test_a_model_scores_without_a_function_in_validation",),
    f"{REWARD}.weight": (f"{_SCORED}::test_combined_scores_do_not_depend_on_ranks",),
    f"{REWARD}.worker_cls": (f"{_SCORED}::test_a_custom_class_scores",),
    "actor_rollout_ref.worker_cls": ("tests/unit/trainer/test_own_roles.py::test_a_step_runs_with_custom_roles",),
    f"{CRITIC}.worker_cls": ("tests/unit/trainer/test_own_roles.py::test_a_step_runs_with_custom_roles",),
    **_each(
        f"{_REWARDS}::test_key_changes_the_overlong_penalty",
        f"{_BUFFER}.enable", f"{_BUFFER}.len", f"{_BUFFER}.penalty_factor", f"{_BUFFER}.log",
    ),
    f"{REWARD}.model.input_tokenizer": (
        "tests/unit/roles/test_reward_model.py::test_scores_are_the_logits_of_transformers_on_the_same_ids",
        "tests/unit/roles/test_reward_model.py"
        "::test_reward_input_uses_the_reward_models_template_and_tokenizer",
    ),
    "custom_reward_function.path": (f"{_REWARDS}::test_path_and_name_select_the_function",),
    "custom_reward_function.name": (f"{_REWARDS}::test_path_and_name_select_the_function",),
    "custom_reward_function.reward_kwargs": (f"{_REWARDS}::test_reward_kwargs_are_arguments_of_every_call",),
    "custom_reward_function.batched": (f"{_REWARDS}::test_batched_selects_the_calling_convention",),
    "custom_reward_function.max_abs_score": (f"{_DIVERGENCE}::test_an_absurd_score_counts_as_failed",),
    "custom_reward_function.timeout": (f"{_REWARDS}::test_timeout_limits_one_call",),
    "custom_reward_function.load_timeout": (
        "tests/smoke/test_bad_input.py::test_an_unloadable_reward_is_an_error_before_the_run[takes for ever]",
    ),
    "custom_reward_function.functions": (f"{_REWARDS}::test_functions_and_weights_are_summed",),
    "custom_reward_function.weights": (f"{_REWARDS}::test_functions_and_weights_are_summed",),
    "custom_reward_function.max_concurrency": (f"{_REWARDS}::test_max_concurrency_limits_async_calls",),
    "custom_reward_function.num_workers": (f"{_REWARDS}::test_num_workers_is_the_number_of_scoring_processes",),
    "custom_reward_function.on_error": (f"{_REWARDS}::test_on_error_selects_the_handling_of_failed_calls",),
    **{
        f"{section}.download": (
            f"{_CHECKS}::test_uncached_hub_name_requires_download[{section}.path]",
            "tests/smoke/test_hub_models.py::test_missing_models_are_downloaded",
        )
        for section in (MODEL, f"{CRITIC}.model", f"{REWARD}.model")
    },
    # -- algorithm
    "algorithm.gamma": (_PPO,),
    "algorithm.lam": (_PPO,),
    "algorithm.adv_estimator": (_GRPO, "tests/smoke/test_pairs.py::test_every_advantage_estimator_trains"),
    "algorithm.norm_adv_by_std_in_grpo": (f"{_RELATIVES}[dr_grpo]",),
    **dict.fromkeys(
        ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
        (f"{_ALGORITHMS}::test_rewards_that_an_estimator_reads_separately",),
    ),
    "algorithm.use_kl_in_reward": (_PPO,),
    "algorithm.kl_ctrl.kl_coef": (_PPO,),
    **dict.fromkeys(
        (
            "algorithm.kl_penalty", "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.horizon",
            "algorithm.kl_ctrl.target_kl",
        ),
        (_ADAPTIVE,),
    ),
    "algorithm.filter_groups.max_num_gen_batches": (
        f"{_DYNAMIC}::test_too_many_batches_are_an_error_with_a_fix",
    ),
    "algorithm.rollout_correction.rollout_is": (f"{_CORRECTION}::test_the_first_loss_is_the_weighted_mean_advantage",),
    "algorithm.rollout_correction.rollout_is_threshold": (
        f"{_CORRECTION}::test_weights_and_their_metrics_by_hand",
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (
        f"{_CORRECTION}::test_normalized_correction_weights_have_mean_one",
    ),
    "algorithm.rollout_correction.rollout_rs": (f"{_CORRECTION}::test_rejected_rows_do_not_count",),
    "algorithm.rollout_correction.rollout_rs_threshold": (f"{_CORRECTION}::test_rejected_rows_do_not_count",),
    "algorithm.rollout_correction.loss_type": (
        f"{_CORRECTION}::test_reinforce_weights_the_policy_gradient_by_the_current_policy",
    ),
    "algorithm.rollout_correction.bypass_mode": (
        f"{_CORRECTION}::test_bypass_mode_uses_the_rollout_log_probs",
    ),
    # -- asynchronous training
    "async_training.max_staleness": (
        "tests/unit/trainer/test_async_ppo.py::test_a_pipeline_equals_its_synchronous_emulation[grpo]",
    ),
    "async_training.mode": (
        "tests/unit/config/test_foreign.py::test_names_of_asynchronous_training_are_answered_with_the_key",
    ),
    # -- trainer
    f"{ROLLOUT}.resource_pool": (
        "tests/unit/config/test_layout.py::test_a_rollout_on_devices_of_its_own_has_a_pool",
    ),
    **_each(
        f"{_PLACE}::test_key_changes_the_requested_processes",
        "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.cpus_per_rank", "trainer.resource_pools",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.resource_pool", f"{CRITIC}.resource_pool", f"{REWARD}.resource_pool",
    ),
    **_each(
        f"{_PLACE}::test_key_reaches_the_controller",
        "trainer.controller", "ray_kwargs.ray_init", "trainer.default_local_dir",
    ),
    **dict.fromkeys(
        ("trainer.worker_timeout", "trainer.worker_timeouts.generate", "trainer.worker_timeouts.update",
         "trainer.worker_timeouts.save"),
        (f"{_PLACE}::test_time_limits_reach_the_controller",),
    ),
    **_each(
        f"{_PLACE}::test_key_selects_the_engine", f"{ACTOR}.strategy", f"{CRITIC}.strategy", f"{REWARD}.strategy"
    ),
    **_each(
        f"{_PLACE}::test_key_reaches_the_trackers",
        "trainer.project_name", "trainer.experiment_name",
    ),
    f"{_TURNS}.environment": (f"{_EPISODES}::test_an_episode_is_trained_as_one_row",),
    f"{_TURNS}.environment_kwargs": (f"{_EPISODES}::test_keys_reach_the_environments",),
    f"{_TURNS}.tools": (f"{_TOOLS}::test_functions_from_python_are_tools",),
    f"{_TURNS}.format": (f"{_TOOLS}::test_functions_from_python_are_tools",),
    f"{_TURNS}.agent": (f"{_AGENTS}::test_a_program_and_a_class_train_equally",),
    f"{_TURNS}.allow_sampling": (
        f"{_AGENTS}::test_keys_reach_the_programs",
        "tests/unit/agents/test_endpoint.py::test_allowed_sampling_options_are_recorded",
    ),
    f"{_TURNS}.max_concurrency": (f"{_AGENTS}::test_keys_reach_the_programs",),
    f"{_TURNS}.history": (f"{_EPISODES}::test_what_does_not_work_is_named",),
    f"{_TURNS}.schedule": (
        f"{_EPISODES}::test_schedule_reaches_the_player",
        f"{_PLAY}::test_a_slow_environment_holds_up_its_own_episode_only",
    ),
    f"{_TURNS}.num_workers": (
        f"{_EPISODES}::test_keys_reach_the_environments",
        "tests/unit/agents/test_pool.py::test_results_do_not_depend_on_the_number_of_processes",
    ),
    **dict.fromkeys(
        (f"{_TURNS}.timeout", f"{_TURNS}.start_timeout"),
        (
            f"{_EPISODES}::test_keys_reach_the_environments",
            "tests/unit/agents/test_pool.py::test_time_limits_are_kept",
        ),
    ),
    f"{_TURNS}.max_assistant_turns": (f"{_LIMITS}[max_assistant_turns]", f"{_PLAY}::test_turns_are_limited"),
    f"{_TURNS}.max_turn_length": (
        f"{_LIMITS}[max_turn_length]", f"{_PLAY}::test_cut_answers_are_beginnings_of_longer_ones",
    ),
    f"{_TURNS}.max_tool_response_length": (
        f"{_LIMITS}[max_tool_response_length]", f"{_PLAY}::test_long_texts_are_truncated[left-abcd...(truncated)...]",
    ),
    f"{_TURNS}.tool_response_truncate_side": (
        f"{_LIMITS}[tool_response_truncate_side]",
        f"{_PLAY}::test_long_texts_are_truncated[left-abcd...(truncated)...]",
    ),
    f"{_TURNS}.episode_timeout": (f"{_LIMITS}[episode_timeout]", f"{_PLAY}::test_the_time_of_an_episode_is_limited"),
    "trainer.logger": (
        f"{_PLACE}::test_key_reaches_the_trackers[trainer.project_name]",
        "tests/smoke/test_reward_model.py::test_the_command_line_reports_the_model_scores",
    ),
    "trainer.save_freq": (f"{_RESUME}::test_retention_keeps_the_configured_number_of_checkpoints",),
    "trainer.val_only": (
        f"{_RUN}::test_key_changes_the_run[trainer.val_only]",
        f"{_PPO_UNIT}::test_a_standalone_validation_does_not_change_its_run",
    ),
    "trainer.log_val_generations": (_WRITTEN,),
    "trainer.sample_interval": (f"{_PPO_UNIT}::test_best_and_worst_response_are_logged_once_per_interval",),
    "trainer.validation_data_dir": (_WRITTEN,),
    "trainer.rollout_data_dir": (
        f"{_PPO_UNIT}::test_responses_of_every_validation_and_every_step_are_written_down",
    ),
    "trainer.critic_warmup": (f"{_PARITY}::test_actor_is_untouched_while_the_critic_warms_up",),
    "trainer.stop_timeout": ("tests/smoke/test_stop.py::test_a_step_whose_scoring_hangs_is_abandoned",),
    "trainer.max_skipped_steps": (f"{_DIVERGENCE}::test_the_number_of_skipped_steps_ends_the_run",),
    "trainer.max_idle_steps": (f"{_IDLE}::test_an_idle_run_ends_with_status_1_and_resumes",),
    "trainer.default_hdfs_dir": (
        f"{_RESUME}::test_resume_path_uses_the_remote_copy",
        "tests/remote/test_protocols.py::test_a_run_reads_and_resumes_from_a_remote_folder",
    ),
    "trainer.max_actor_ckpt_to_keep": (f"{_RESUME}::test_retention_keeps_the_configured_number_of_checkpoints",),
    "trainer.max_critic_ckpt_to_keep": (f"{_RESUME}::test_retention_keeps_the_configured_number_of_checkpoints",),
    "trainer.best_metric": (_BEST,),
    "trainer.best_metric_mode": (_BEST,),
    "trainer.max_restarts": ("tests/unit/cli/test_restarts.py::test_restarts_count_until_a_step_is_saved",),
    f"{ROLLOUT}.max_restarts": (
        "tests/unit/trainer/test_own_rollout.py::test_a_killed_rollout_starts_again_as_often_as_allowed[0]",
    ),
    "trainer.resume_mode": (
        f"{_RESUME}::test_resume_mode_disable_keeps_earlier_steps_aside",
    ),
    "trainer.resume_from_path": (f"{_RESUME}::test_resume_path_starts_from_that_step",),
    "trainer.use_legacy_worker_impl": (
        f"{_CHECKS}::test_contradicting_keys_are_rejected", f"{_CHECKS}::test_legacy_switch_may_be_off",
    ),
}  # fmt: skip
"""Tests of keys that act without a field of an engine or a rollout, or in addition to one."""


def tests_of_key(key: str) -> tuple[str, ...]:
    """Return the ids of the tests that fail if the key does nothing."""
    if key not in FIELDS:
        return PROOFS.get(key, ())
    field = FIELDS[key]
    return (f"{REACHES}[{key}]", *FIELD_TESTS[field.kind].get(field.field, ()), *PROOFS.get(key, ()))
