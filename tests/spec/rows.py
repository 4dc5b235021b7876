"""What the specification names: methods and features, keys, command line; where we deviate; what is not there yet.

    METHODS["`BaseEngine`"]["optimizer_step(self)"]      # (what it means here, tests)
    KEYS                                                 # keys as it spells them; tests of each are in `keys.py`

Meanings of keys are those of the schema and stand there once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec.told import ACTOR, CRITIC, MODEL, REF, REWARD, ROLLOUT

Means = tuple[str, tuple[str, ...]]

_RULE = "tests/contracts/test_engine_contract.py::test_engine_keeps_rule"
_SHARDED = "tests/contracts/test_sharded_contract.py::test_sharded_engine_keeps_rule"
_SIGNATURE = "tests/architecture/test_names.py::test_engine_method_has_the_specified_signature"
_MODES = "tests/architecture/test_names.py::test_roles_offer_the_specified_methods_in_the_specified_modes"
_CONTROLLER = "tests/contracts/test_controller_contract.py"
_OPTIONS, _ENGINE = "tests/unit/engine/fsdp/test_options.py", "tests/spec/test_engine_keys.py"
_ROLES, _SCORER = "tests/unit/roles/test_roles.py", "tests/unit/roles/test_reward_model.py"
_SPLIT = "tests/unit/models/test_sequence.py::test_split_columns_come_back_whole"
_HYBRID = "tests/unit/reshard/test_hybrid.py"


def _method(name: str, *rules: str, also: tuple[str, ...] = ()) -> tuple[str, ...]:
    return f"{_SIGNATURE}[{name}]", *(f"{_RULE}[fsdp-{rule}]" for rule in rules), *also


_ENGINE_METHODS: dict[str, Means] = {
    "__init__(self, config)": (
        "An `EngineConfig`, checked; a class that lacks a method is not constructed.",
        ("tests/contracts/test_engine_contract.py::test_an_engine_without_a_method_fails_at_construction_and_by_name",),
    ),
    "init_model(self)": (
        "Model, optimizer and schedule; collective. Every other call before it is an error that names it.",
        _method("init_model", "errors_name_the_missing_call", "predictions"),
    ),
    "train_mode(self)": (
        "Context manager: dropout on, what rests in host memory is there inside; undone at its end.",
        _method("train_mode", "modes", also=("tests/unit/engine/test_offload.py::test_parts_rest_where_they_should",)),
    ),
    "eval_mode(self)": ("The same without dropout and without optimizer.", _method("eval_mode", "modes")),
    "forward_backward_step(self, batch, ctx, forward_only, preprocess_fn, postprocess_fn)": (
        "A batch of any size, cut into micro-batches here; the hooks run once for each. (predictions, ctx), or "
        "(predictions, loss, ctx); predictions in the order of the rows. `loss_fn` divides by the counts in `ctx`.",
        _method("forward_backward_step", "step_equals_oracle", "hooks", "split_invariance", "order_of_rows"),
    ),
    "optimizer_zero_grad(self)": (
        "Gradients of all parameters are gone.",
        _method("optimizer_zero_grad", also=(f"{_ENGINE}::test_the_classic_training_loop_runs_on_every_engine",)),
    ),
    "optimizer_step(self)": (
        "Clips, steps, and returns the norm before clipping. A gradient that is not finite changes nothing and is "
        "counted.",
        _method("optimizer_step", "norm_is_before_clipping", "non_finite_gradient_is_skipped"),
    ),
    "lr_scheduler_step(self)": (
        "One step of the schedule; returns the rate of the next update.", _method("lr_scheduler_step", "schedule"),
    ),
    "shard_data(self, data)": (
        "This rank's part of rows whose tokens are shared out (sequence parallelism); else the rows themselves.",
        _method("shard_data", also=(_SPLIT,)),
    ),
    "unshard_data(self, data)": (
        "The whole rows again.",
        _method("unshard_data", also=(f"{_SHARDED}[sp2-seat_and_shards]", _SPLIT)),
    ),
    "set_loss_fn(self, loss_fn)": (
        "`loss_fn(data, predictions, ctx) -> (loss, ctx)`, for all steps to come; without one a step is an error.",
        _method("set_loss_fn", "errors_name_the_missing_call", "step_equals_oracle"),
    ),
    "to(self, device, model, optimizer)": (
        "Moves weights, optimizer state, or both.",
        _method("to", "offload_changes_nothing", also=(f"{_ENGINE}::test_to_moves_what_it_is_told_to_move",)),
    ),
    "save_checkpoint(self, local_path, hdfs_path, global_step, max_ckpt_to_keep)": (
        "Whole or not at all, for any number of ranks, with a manifest; a copy on any file system of fsspec; the "
        "oldest go.",
        _method("save_checkpoint", "resume_is_bitwise", "damaged_checkpoints_are_rejected", "retention", "remote_copy"),
    ),
    "load_checkpoint(self, local_path, hdfs_path, del_local_after_load)": (
        "The next step is the same to the last bit. Only a copy that was brought from elsewhere is deleted.",
        _method("load_checkpoint", "resume_is_bitwise", "remote_copy"),
    ),
    "the classic training loop": (
        "Runs as it is written there, on every engine.",
        (
            "tests/unit/engine/test_classic_loop.py::test_the_classic_training_loop_learns",
            f"{_ENGINE}::test_the_classic_training_loop_runs_on_every_engine",
        ),
    ),
}  # fmt: skip

_FEATURES: dict[str, Means] = {
    "sharding over several devices": (
        "FSDP2 (`fsdp`, `fsdp2`), or the older wrapper (`fsdp1`).",
        (f"{_SHARDED}[two-step_equals_oracle]", f"{_SHARDED}[four-step_equals_oracle]",
         f"{_SHARDED}[fsdp1_two-step_equals_oracle]"),
    ),
    "HybridShard": (
        "`fsdp_size` below the number of ranks: copies of shards, on a 2-D mesh. The specification leaves it out.",
        (f"{_SHARDED}[hsdp-step_equals_oracle]", f"{_OPTIONS}::test_ranks_share_weights_and_rows_as_they_are_told"),
    ),
    "offloading of parameters, gradients and optimizer": (
        "Between phases, or by FSDP's own policy at all times.",
        (f"{_SHARDED}[offload-step_equals_oracle]", f"{_OPTIONS}::test_what_rests_in_host_memory_is_what_was_asked_for",
         f"{_OPTIONS}::test_with_the_policy_units_live_in_host_memory"),
    ),
    "offloading of activations": (
        "What is saved for the backward pass waits in host memory.",
        (f"{_SHARDED}[activation_offload-step_equals_oracle]",
         f"{_OPTIONS}::test_activations_of_a_training_step_go_to_host_memory"),
    ),
    "LoRA": (
        "An adapter is trained; exported and handed over merged, or by itself.",
        (f"{_SHARDED}[lora-step_equals_oracle]",
         "tests/unit/engine/test_reference_lora.py::test_training_takes_the_steps_of_peft_and_torch"),
    ),
    "sequence parallelism": (
        "Ulysses: ranks share the tokens of a micro-batch.",
        (f"{_SHARDED}[sp2-step_equals_oracle]",
         "tests/unit/models/test_sequence.py::test_log_probs_entropy_and_gradients_do_not_depend_on_the_ranks"),
    ),
    "dynamic batch size": (
        "Micro-batches by tokens; the budget is a hard limit.",
        (f"{_SHARDED}[dynamic-step_equals_oracle]", f"{_RULE}[fsdp-token_budget_is_hard]"),
    ),
    "remove padding": (
        "Deviates: there is no padding to remove. Rows are ragged from the file to the gradient.",
        ("tests/unit/models/test_packed.py::test_packed_rows_give_what_transformers_gives_on_each_row_alone",
         "tests/unit/data/test_prompts.py::test_nothing_is_padded"),
    ),
    "an engine stands alone": (
        "No role and no controller: `camshaft check-engine` tries anybody's; a script of a page trains with one.",
        ("tests/smoke/test_examples.py::test_an_engine_alone_trains_on_two_ranks",
         "tests/contracts/test_sharded_contract.py::test_the_command_line_checks_on_ranks"),
    ),
    "roles know nothing of engines": (
        "Roles import the facade alone, and no backend name is compared outside the registry.",
        ("tests/architecture/test_imports.py::test_roles_and_reshard_see_the_facades_of_engine_and_rollout_only",
         "tests/architecture/test_imports.py::test_no_backend_name_is_compared_outside_the_registry"),
    ),
    "supervised training on the same engines": (
        "`camshaft sft`.",
        ("tests/unit/trainer/test_sft.py::test_losses_are_those_of_plain_transformers_over_all_trained_tokens",
         "tests/smoke/test_ranks.py::test_supervised_training_and_its_export_do_not_depend_on_the_number_of_ranks"),
    ),
    "an immutable config in a hierarchy": (
        "Frozen sections, closed to unknown keys.",
        ("tests/unit/config/test_schema.py::test_a_config_cannot_be_changed",),
    ),
}  # fmt: skip


def _role(role: str, *tests: str) -> tuple[str, ...]:
    return f"{_MODES}[{role}]", *tests


_TRIO, _CRITIC, _RM = "ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"
_WORKERS: dict[str, Means] = {
    "`Dispatch.ONE_TO_ALL`": (
        "Every rank gets the call; rank 0's result comes back.",
        (f"{_CONTROLLER}::test_one_to_all_returns_the_result_of_rank_zero",),
    ),
    "`Dispatch.DP_COMPUTE_PROTO`": (
        "Rows are split over data-parallel ranks, and merged in their order. Seats say who reads what.",
        (f"{_CONTROLLER}::test_each_rank_sees_an_equal_part",
         f"{_CONTROLLER}::test_the_same_batch_gives_the_same_rows_in_the_same_order_on_any_number_of_ranks",
         f"{_CONTROLLER}::test_model_parallel_neighbours_work_on_the_same_rows_and_one_of_them_answers"),
    ),
    f"`{_TRIO}.init_model(self)`": (
        "`ONE_TO_ALL`. Actor, rollout, and where the KL divergence is used the reference.",
        _role(_TRIO, f"{_ROLES}::test_without_a_use_for_it_there_is_no_reference"),
    ),
    f"`{_TRIO}.generate_sequences(self, prompts)`": (
        "`DP_COMPUTE_PROTO`. The rollout generates, then the actor recomputes the log-probs; the trainer asks for them "
        "as a phase of its own.",
        _role(_TRIO, f"{_ROLES}::test_generation_recomputes_old_log_probs_unless_it_is_told_not_to",
              f"{_ROLES}::test_log_probs_and_entropy_are_those_of_plain_transformers_at_the_sampling_temperature"),
    ),
    f"`{_TRIO}.update_actor(self, data)`": (
        "`DP_COMPUTE_PROTO`. PPO with an entropy bonus, and a KL loss where asked for.",
        _role(_TRIO, f"{_ROLES}::test_the_first_loss_is_worked_out_by_hand",
              f"{_ROLES}::test_an_update_of_the_actor_names_its_metrics_and_moves_the_weights"),
    ),
    f"`{_TRIO}.compute_ref_log_prob(self, data)`": (
        "`DP_COMPUTE_PROTO`. By a frozen engine, or with LoRA by the actor's without its adapter.",
        _role(_TRIO, f"{_ROLES}::test_the_reference_stays_where_the_actor_began",
              f"{_ROLES}::test_with_an_adapter_the_reference_is_the_actors_own_model_without_it"),
    ),
    f"`{_CRITIC}.init_model(self)`": (
        "`ONE_TO_ALL`. A value model with its optimizer, on any engine.",
        _role(_CRITIC, f"{_ROLES}::test_values_are_those_of_plain_transformers"),
    ),
    f"`{_CRITIC}.compute_values(self, data)`": (
        "`DP_COMPUTE_PROTO`.", _role(_CRITIC, f"{_ROLES}::test_values_are_those_of_plain_transformers"),
    ),
    f"`{_CRITIC}.update_critic(self, data)`": (
        "`DP_COMPUTE_PROTO`. The clipped value loss.",
        _role(_CRITIC, f"{_ROLES}::test_an_update_of_the_critic_names_its_metrics_and_comes_closer",
              "tests/parity/test_parity.py::test_ten_steps_of_ppo_agree_with_the_plain_run"),
    ),
    f"`{_RM}.init_model(self)`": (
        "`ONE_TO_ALL`. A sequence-classification model; any other comes as a worker of the user's own.",
        _role(_RM, f"{_SCORER}::test_a_model_without_a_head_for_scores_is_an_error",
              f"{_SCORER}::test_a_class_of_ones_own_scores"),
    ),
    f"`{_RM}.compute_rm_score(self, data)`": (
        "`DP_COMPUTE_PROTO`.", _role(_RM, f"{_SCORER}::test_scores_are_the_logits_of_transformers_on_the_same_ids"),
    ),
    "checkpoints of the roles that train": (
        "`save_checkpoint`, `load_checkpoint`, as the engine's.",
        (f"{_ROLES}::test_a_checkpoint_of_a_role_brings_its_next_update_back",),
    ),
    "the hybrid engine": (
        "A context manager: weights are handed over, proved by digests, and memory changes hands.",
        (f"{_HYBRID}::test_the_rollout_is_woken_given_weights_and_put_to_sleep",
         f"{_HYBRID}::test_real_rollouts_say_what_the_trained_engine_would_say",
         "tests/unit/reshard/test_faults.py::test_a_fault_on_the_way_is_an_error_that_names_the_weight"),
    ),
    "a role of your own plugs in the same way": (
        "`actor_rollout_ref.worker_cls`, `critic.worker_cls` and `reward_model.worker_cls` name classes; "
        "`ActorRolloutRefWorker` has class attributes for actor, reference and rollout.",
        ("tests/unit/trainer/test_own_roles.py::test_a_step_runs_with_roles_of_your_own",
         "tests/unit/trainer/test_own_roles.py::test_a_class_without_the_methods_of_its_role_is_an_error"),
    ),
    "`DataParallelPPOActor`": (
        "Deviates by name: `camshaft.roles.ActorWorker`, which holds the PPO update on any engine.",
        (f"{_ROLES}::test_the_first_loss_is_worked_out_by_hand",),
    ),
    "`FSDPVLLMShardingManager`": (
        "Deviates by name: `camshaft.reshard.rollout_mode`, one context manager for every engine and rollout.",
        (f"{_HYBRID}::test_real_rollouts_say_what_the_trained_engine_would_say",),
    ),
    "PPO trains on them": (
        "The same numbers as a plain program, step for step.",
        ("tests/parity/test_parity.py::test_ten_steps_of_ppo_agree_with_the_plain_run",
         "tests/parity/test_sharded_parity.py::test_three_steps_in_float32"),
    ),
    "the command line of the example script": (
        "`camshaft ppo` with its keys, tracker included. Deviates by the name of the module.",
        ("tests/unit/config/test_loader.py::test_the_command_line_of_the_specification_is_accepted",
         "tests/smoke/test_ppo_scripts.py"
         "::test_the_command_line_of_the_specification_runs_with_other_places_and_sizes_alone"),
    ),
}  # fmt: skip

METHODS = {"`BaseEngine`": _ENGINE_METHODS, "What engines support": _FEATURES, "Workers": _WORKERS}


def _under(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


_UPDATE = "ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu grad_clip ppo_epochs shuffle"
_OPTIM = "lr lr_warmup_steps_ratio min_lr_ratio warmup_style total_training_steps"
_FSDP = "wrap_policy.transformer_layer_cls_to_wrap wrap_policy.min_num_params param_offload"

KEYS = (
    *_under(
        "data", "tokenizer train_files val_files prompt_key max_prompt_length max_response_length train_batch_size"
    ),
    *_under("data", "val_batch_size return_raw_input_ids return_raw_chat truncation filter_overlong_prompts"),
    *_under("data", "prompt_id_key max_prompt_id_length"),
    "actor_rollout_ref.hybrid_engine",
    *_under(MODEL, "path external_lib external_libs override_config enable_gradient_checkpointing use_remove_padding"),
    *_under(ACTOR, f"strategy {_UPDATE} clip_ratio entropy_coeff use_kl_loss"),
    *_under(f"{ACTOR}.optim", _OPTIM),
    *_under(f"{ACTOR}.fsdp_config", f"{_FSDP} grad_offload optimizer_offload"),
    *_under(f"{REF}.fsdp_config", _FSDP),
    f"{REF}.log_prob_micro_batch_size",
    *_under(ROLLOUT, "name temperature top_k top_p response_length dtype gpu_memory_utilization ignore_eos"),
    *_under(ROLLOUT, "enforce_eager free_cache_engine load_format tensor_model_parallel_size max_num_batched_tokens"),
    *_under(ROLLOUT, "max_num_seqs log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu do_sample"),
    *_under(CRITIC, f"strategy {_UPDATE}"),
    *_under(f"{CRITIC}.optim", _OPTIM),
    *_under(f"{CRITIC}.model", "path external_lib override_config enable_gradient_checkpointing use_remove_padding"),
    *_under(f"{CRITIC}.model.fsdp_config", f"{_FSDP} grad_offload optimizer_offload"),
    *_under(REWARD, "enable micro_batch_size max_length model.input_tokenizer model.path model.external_lib"),
    *_under(f"{REWARD}.model.fsdp_config", "min_num_params param_offload"),
    *_under("algorithm", "gamma gemma lam adv_estimator kl_penalty use_kl_in_reward kl_ctrl.type kl_ctrl.kl_coef"),
    *_under("trainer", "total_epochs project_name experiment_name logger nnodes n_gpus_per_node save_freq test_freq"),
    *_under("trainer", "critic_warmup default_hdfs_dir default_local_dir use_legacy_worker_impl"),
)
"""As the specification spells them, older names included."""

_OLDER = "tests/spec/test_table.py::test_an_older_name_means_the_newer_one"
ALIASES = {
    key: (f"{_OLDER}[{key}]",)
    for key in (
        f"{MODEL}.external_libs", f"{ACTOR}.optim.warmup_style", f"{CRITIC}.optim.warmup_style",
        f"{REWARD}.model.fsdp_config.min_num_params", "algorithm.gemma",
    )
}  # fmt: skip
"""Tests of older names."""

DEVIATES = {
    "data.max_prompt_length": "Nothing is padded to it: rows keep their lengths.",
    "actor_rollout_ref.hybrid_engine": "`false` is refused, as there.",
    f"{MODEL}.use_remove_padding": "`false` changes nothing and is told so: no token is ever padded.",
    f"{CRITIC}.model.use_remove_padding": "`false` changes nothing and is told so: no token is ever padded.",
    f"{ACTOR}.strategy": "`fsdp` is FSDP2; the older wrapper is `fsdp1`.",
    f"{ACTOR}.ppo_mini_batch_size": "It counts prompts; each brings `rollout.n` sequences.",
    f"{ACTOR}.optim.total_training_steps": "Filled in by the trainer where it is -1, as there; another number is kept.",
    f"{ROLLOUT}.top_k": "0 and -1 both mean off, whatever the generator.",
    f"{ROLLOUT}.load_format": (
        "What a generator starts with, for vllm and sglang: `dummy_...` nothing, any other name the folder's weights. "
        "The actor's are handed over in one way, before each generation."
    ),
    f"{REWARD}.micro_batch_size": "It counts sequences over all ranks; `micro_batch_size_per_gpu` wins.",
    "trainer.logger": "The default is `[console, jsonl]`.",
    "trainer.project_name": "The default is another name.",
    "trainer.default_hdfs_dir": "The default is none: a second place is asked for. Any file system of fsspec.",
    "trainer.use_legacy_worker_impl": (
        "There is one implementation: `auto`, `disable` and `false` are accepted with a notice, `enable` and `true` "
        "are an error."
    ),
}
"""Key -> where it is not what the specification says, and what it is."""


@dataclass(frozen=True)
class Pending:
    """A value that is refused as "not yet"; one that is not refused any more must leave the list."""

    key: str
    value: Any
    missing: str


PENDING = (
    Pending(f"{ACTOR}.strategy", "megatron", "the Megatron engine"),
    Pending(f"{ACTOR}.strategy", "torchtitan", "the torchtitan engine"),
)
"""What is being built. `python tests/spec/table.py --strict` fails while there is any."""
