"""Contents of the specification: methods, features and keys, with deviations and unimplemented values.

    METHODS["`BaseEngine`"]["optimizer_step(self)"]      # (behavior, tests)
    KEYS                                                 # config keys; their tests are in `keys.py`

The description of a key is defined in the schema only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec.fields import ACTOR, CRITIC, MODEL, REF, REWARD, ROLLOUT

Row = tuple[str, tuple[str, ...]]

_SHARDED = "tests/contracts/test_sharded_contract.py::test_sharded_engine_keeps_rule"
_STEPS = "tests/parity/test_sharded_parity.py::test_three_steps_in_float32"
_SIGNATURE = "tests/architecture/test_names.py::test_engine_method_has_the_specified_signature"
_MODES = "tests/architecture/test_names.py::test_roles_offer_the_specified_methods_in_the_specified_modes"
_CONTROLLER = "tests/contracts/test_controller_contract.py::test_backend_keeps_rule"
_OPTIONS, _ENGINE = "tests/unit/engine/fsdp/test_options.py", "tests/spec/test_engine_keys.py"
_ROLES, _SCORER = "tests/unit/roles/test_roles.py", "tests/unit/roles/test_reward_model.py"
_SPLIT = "tests/unit/models/test_sequence.py::test_split_columns_are_restored"
_PROTOCOLS = "tests/remote/test_protocols.py"
_HYBRID = "tests/unit/reshard/test_hybrid.py"


def _method(name: str, *rules: str, also: tuple[str, ...] = ()) -> tuple[str, ...]:
    return f"{_SIGNATURE}[{name}]", *(f"{_SHARDED}[two-{rule}]" for rule in rules), *also


_ENGINE_METHODS: dict[str, Row] = {
    "__init__(self, config)": (
        "Validates the `EngineConfig`. A class that lacks one of the methods cannot be constructed. Deviates: five "
        "further members are required (`learning_rate`, `seat`, `named_weights`, `disable_adapter` and "
        "`skipped_steps`), and the config is an `EngineConfig`, not a dict.",
        (
            "tests/contracts/test_engine_contract.py::test_an_engine_without_a_method_cannot_be_constructed",
            "tests/unit/engine/test_step.py::test_a_dict_is_rejected_as_a_config",
        ),
    ),
    "init_model(self)": (
        "Builds the model, the optimizer and the schedule. All ranks must call it. Any earlier call of another method "
        "raises an error that names the missing call.",
        _method("init_model", "errors_name_the_missing_call", "predictions"),
    ),
    "train_mode(self)": (
        "Context manager that enables dropout and loads offloaded state to the device. It restores both on exit.",
        _method(
            "train_mode", "modes", also=("tests/unit/engine/test_offload.py::test_parts_are_offloaded_as_configured",)
        ),
    ),
    "eval_mode(self)": (
        "Context manager that disables dropout and loads offloaded parameters, but not the optimizer state, to the "
        "device. It restores both on exit.",
        _method("eval_mode", "modes", also=(f"{_OPTIONS}::test_eval_mode_does_not_load_the_optimizer_state",)),
    ),
    "forward_backward_step(self, batch, ctx, forward_only, preprocess_fn, postprocess_fn)": (
        "Splits a batch of any size into micro-batches and runs the hooks once for each. Returns `(predictions, ctx)` "
        "or `(predictions, loss, ctx)`, with predictions in the order of the rows. `loss_fn` divides by counts in "
        "`ctx`.",
        _method("forward_backward_step", "step_equals_oracle", "hooks", "split_invariance", "order_of_rows"),
    ),
    "optimizer_zero_grad(self)": (
        "Clears the gradients of all parameters.",
        _method("optimizer_zero_grad", also=(f"{_ENGINE}::test_classic_training_loop_runs_on_every_engine",)),
    ),
    "optimizer_step(self)": (
        "Clips the gradient norm, updates the weights, and returns the norm before clipping. A non-finite gradient "
        "skips the update and is counted. Deviates: the optional argument `hyperparameters` "
        "replaces those of the config in this step; engines declare if they accept it.",
        _method(
            "optimizer_step", "norm_is_before_clipping", "non_finite_gradient_is_skipped", "hyperparameters_of_a_step"
        ),
    ),
    "lr_scheduler_step(self)": (
        "Advances the schedule by one step and returns the learning rate of the next update.",
        _method("lr_scheduler_step", "schedule"),
    ),
    "shard_data(self, data)": (
        "With sequence parallelism, returns this rank's tokens of every row. Otherwise returns the rows unchanged.",
        _method("shard_data", also=(_SPLIT,)),
    ),
    "unshard_data(self, data)": (
        "Inverts `shard_data` and returns complete rows.",
        _method("unshard_data", also=(f"{_SHARDED}[sp2-seat_and_shards]", _SPLIT)),
    ),
    "set_loss_fn(self, loss_fn)": (
        "Sets `loss_fn(data, predictions, ctx) -> (loss, ctx)` for later steps. A step without a loss function raises "
        "an error.",
        _method("set_loss_fn", "errors_name_the_missing_call", "step_equals_oracle"),
    ),
    "to(self, device, model, optimizer)": (
        "Moves the weights, the optimizer state, or both to a device.",
        _method("to", "offload_changes_nothing", also=(f"{_ENGINE}::test_to_moves_the_selected_parts",)),
    ),
    "save_checkpoint(self, local_path, hdfs_path, global_step, max_ckpt_to_keep)": (
        "Writes a checkpoint atomically, with a manifest, in a format that any number of ranks can load. Copies it to "
        "any fsspec file system, and deletes the engine's oldest checkpoints. Deviates: the caller names the folder. "
        "The manifest records `global_step`, which orders the checkpoints.",
        _method(
            "save_checkpoint", "resume_is_bitwise", "damaged_checkpoints_are_rejected", "retention", "remote_copy",
            also=(f"{_PROTOCOLS}::test_a_checkpoint_is_copied_replaced_and_removed",),
        ),
    ),
    "load_checkpoint(self, local_path, hdfs_path, del_local_after_load)": (
        "Loads a checkpoint. The next step is bitwise identical to that of the engine that saved it. Deletes the local "
        "folder only if it was downloaded by this call.",
        _method(
            "load_checkpoint", "resume_is_bitwise", "remote_copy",
            also=(f"{_PROTOCOLS}::test_a_run_reads_and_resumes_from_a_remote_folder",),
        ),
    ),
    "the classic training loop": (
        "Runs as in the specification, on every engine.",
        (
            "tests/unit/engine/test_classic_loop.py::test_the_classic_training_loop_learns",
            f"{_ENGINE}::test_classic_training_loop_runs_on_every_engine",
        ),
    ),
}  # fmt: skip

_FEATURES: dict[str, Row] = {
    "sharding over several devices": (
        "FSDP2 (`fsdp`, alias `fsdp2`) or FSDP1 (`fsdp1`).",
        (f"{_SHARDED}[two-step_equals_oracle]", f"{_STEPS}[four]",
         f"{_STEPS}[fsdp1_two]"),
    ),
    "HybridShard": (
        "With `fsdp_size` below the number of ranks, the weights are sharded over groups of `fsdp_size` ranks and "
        "replicated between the groups. Not in the specification.",
        (f"{_STEPS}[hsdp]", f"{_OPTIONS}::test_ranks_share_weights_and_rows_by_config"),
    ),
    "offloading of parameters, gradients and optimizer": (
        "Moves state to host memory between phases, or keeps it there at all times with FSDP's offload policy.",
        (f"{_STEPS}[offload]", f"{_OPTIONS}::test_offloaded_parts_match_the_config",
         f"{_OPTIONS}::test_with_the_policy_units_live_in_host_memory"),
    ),
    "offloading of activations": (
        "Keeps the activations that are saved for the backward pass in CPU memory.",
        (f"{_STEPS}[activation_offload]",
         f"{_OPTIONS}::test_activations_of_a_training_step_are_offloaded",
         "tests/unit/models/test_activations.py::test_activation_offload_keeps_gradients_bitwise"),
    ),
    "LoRA": (
        "Trains an adapter, and exports it and syncs it to the rollout either merged or separately.",
        (f"{_STEPS}[lora]",
         "tests/unit/engine/test_reference_lora.py::test_training_takes_the_steps_of_peft_and_torch",
         "tests/unit/reshard/test_faults.py::test_the_rollout_receives_merged_or_base_weights",
         "tests/unit/reshard/test_adapters.py::test_base_and_adapter_make_the_merged_weights",
         "tests/unit/export/test_command.py::test_a_merged_adapter_matches_peft"),
    ),
    "sequence parallelism": (
        "Splits the tokens of a micro-batch over ranks (Ulysses).",
        (f"{_STEPS}[sp2]",
         "tests/unit/models/test_sequence.py::test_log_probs_and_gradients_do_not_depend_on_ranks"),
    ),
    "dynamic batch size": (
        "Fills micro-batches up to a token budget, which is a hard limit.",
        (f"{_STEPS}[dynamic]", f"{_SHARDED}[two-token_budget_is_hard]"),
    ),
    "remove padding": (
        "Deviates: rows are packed from the file to the gradient, and batches are never padded.",
        ("tests/unit/models/test_packed.py::test_packed_rows_match_transformers_on_each_row",
         "tests/unit/data/test_prompts.py::test_nothing_is_padded"),
    ),
    "engines without roles or a controller": (
        "`camshaft check-engine` tests any engine. An example script trains a model with an engine only.",
        ("tests/smoke/test_examples.py::test_an_engine_without_roles_trains_on_two_ranks",
         "tests/contracts/test_sharded_contract.py::test_the_command_line_checks_on_ranks"),
    ),
    "roles independent of engines": (
        "Roles import only the interface, and no code outside the registry compares backend names.",
        ("tests/architecture/test_imports.py::test_roles_and_reshard_import_only_engine_and_rollout_interfaces",
         "tests/architecture/test_imports.py::test_no_backend_name_is_compared_outside_the_registry"),
    ),
    "supervised training on the same engines": (
        "`camshaft sft` trains on the same engines.",
        ("tests/unit/trainer/test_sft.py::test_losses_match_transformers_over_all_trained_tokens",
         "tests/smoke/test_ranks.py::test_supervised_training_does_not_depend_on_the_number_of_ranks"),
    ),
    "an immutable hierarchical config": (
        "The sections of the config are frozen and reject unknown keys.",
        ("tests/unit/config/test_schema.py::test_config_is_immutable",),
    ),
}  # fmt: skip


def _role(role: str, *tests: str) -> tuple[str, ...]:
    return f"{_MODES}[{role}]", *tests


_TRIO, _CRITIC, _RM = "ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"
_WORKERS: dict[str, Row] = {
    "`Dispatch.ONE_TO_ALL`": (
        "Calls every rank and returns the result of rank 0.",
        (f"{_CONTROLLER}[local-modes_choose_ranks]",),
    ),
    "`Dispatch.DP_COMPUTE_PROTO`": (
        "Splits rows over the data-parallel ranks and merges the results in order, according to the `Seat` of each "
        "rank.",
        (f"{_CONTROLLER}[local-rows_keep_their_order]", f"{_CONTROLLER}[local-seats_split_and_merge]"),
    ),
    f"`{_TRIO}.init_model(self)`": (
        "`ONE_TO_ALL`. Builds the actor and the rollout, and the reference if the KL divergence is used.",
        _role(_TRIO, f"{_ROLES}::test_an_unused_reference_is_not_built"),
    ),
    f"`{_TRIO}.generate_sequences(self, prompts)`": (
        "`DP_COMPUTE_PROTO`. The rollout generates responses and the actor recomputes their log-probs. In the "
        "trainer, the log-probs are a separate phase.",
        _role(_TRIO, f"{_ROLES}::test_generation_recomputes_old_log_probs_unless_disabled",
              f"{_ROLES}::test_log_probs_and_entropy_match_transformers_at_the_temperature"),
    ),
    f"`{_TRIO}.update_actor(self, data)`": (
        "`DP_COMPUTE_PROTO`. Updates the actor with the PPO loss, an entropy bonus and an optional KL loss.",
        _role(_TRIO, f"{_ROLES}::test_the_first_loss_is_worked_out_by_hand",
              f"{_ROLES}::test_an_actor_update_returns_metrics_and_changes_weights"),
    ),
    f"`{_TRIO}.compute_ref_log_prob(self, data)`": (
        "`DP_COMPUTE_PROTO`. Computes log-probs with a frozen engine, or with LoRA with the actor's engine without its "
        "adapter.",
        _role(_TRIO, f"{_ROLES}::test_the_reference_keeps_the_initial_weights_of_the_actor",
              f"{_ROLES}::test_with_lora_the_reference_is_the_actors_base_model"),
    ),
    f"`{_CRITIC}.init_model(self)`": (
        "`ONE_TO_ALL`. Builds a value model with its optimizer, on any engine.",
        _role(_CRITIC, f"{_ROLES}::test_values_match_transformers"),
    ),
    f"`{_CRITIC}.compute_values(self, data)`": (
        "`DP_COMPUTE_PROTO`. Computes the value of each response token.",
        _role(_CRITIC, f"{_ROLES}::test_values_match_transformers"),
    ),
    f"`{_CRITIC}.update_critic(self, data)`": (
        "`DP_COMPUTE_PROTO`. Updates the critic with the clipped value loss.",
        _role(_CRITIC, f"{_ROLES}::test_a_critic_update_returns_metrics_and_reduces_the_loss",
              "tests/parity/test_parity.py::test_ten_steps_of_ppo_match_the_reference_program"),
    ),
    f"`{_RM}.init_model(self)`": (
        "`ONE_TO_ALL`. Builds a sequence-classification model. Other models require a custom worker.",
        _role(_RM, f"{_SCORER}::test_a_model_without_a_head_for_scores_is_an_error",
              f"{_SCORER}::test_a_custom_class_scores"),
    ),
    f"`{_RM}.compute_rm_score(self, data)`": (
        "`DP_COMPUTE_PROTO`. Computes the score of each response.",
        _role(_RM, f"{_SCORER}::test_scores_are_the_logits_of_transformers_on_the_same_ids"),
    ),
    "checkpoints of trained roles": (
        "`save_checkpoint` and `load_checkpoint` work as in the engine.",
        (f"{_ROLES}::test_a_checkpoint_of_a_role_reproduces_its_next_update",),
    ),
    "the hybrid engine": (
        "A context manager that syncs weights, verifies their checksums, and moves memory between engine and rollout.",
        (f"{_HYBRID}::test_the_rollout_is_woken_given_weights_and_put_to_sleep",
         f"{_HYBRID}::test_real_rollouts_match_the_trained_engine",
         "tests/unit/reshard/test_faults.py::test_a_weight_sync_fault_names_the_weight"),
    ),
    "custom roles": (
        "`actor_rollout_ref.worker_cls`, `critic.worker_cls` and `reward_model.worker_cls` select classes. Class "
        "attributes of `ActorRolloutRefWorker` set the classes of the actor, the reference and the rollout.",
        ("tests/unit/trainer/test_own_roles.py::test_a_step_runs_with_custom_roles",
         "tests/unit/trainer/test_own_roles.py::test_a_class_without_the_methods_of_its_role_is_an_error"),
    ),
    "`DataParallelPPOActor`": (
        "Renamed to `camshaft.roles.ActorWorker`, which runs the PPO update on any engine.",
        (f"{_ROLES}::test_the_first_loss_is_worked_out_by_hand",),
    ),
    "`FSDPVLLMShardingManager`": (
        "Renamed to `camshaft.reshard.rollout_mode`, a context manager for all engines and rollouts.",
        (f"{_HYBRID}::test_real_rollouts_match_the_trained_engine",),
    ),
    "`vLLMRollout`": (
        "Renamed to `camshaft.rollout.vllm.VLLMRollout`. It runs vLLM unchanged inside the ranks.",
        ("tests/contracts/test_vllm_contract.py::test_vllm_keeps_rule",),
    ),
    "`dtensor_weight_loader`, `hf_weight_loader`": (
        "Deviates: there are no weight loaders for each model. Every engine yields full weights under their names in "
        "`transformers`, and every rollout reads them.",
        (f"{_HYBRID}::test_real_rollouts_match_the_trained_engine",
         "tests/contracts/test_rollout_contract.py::test_rollout_keeps_rule[torch-new_weights_replace_old_ones]"),
    ),
    "`WorkerGroup`": (
        "The processes of a role, one per rank. `spawn` returns it with the type of the role.",
        (f"{_CONTROLLER}[local-modes_choose_ranks]",),
    ),
    "PPO training": (
        "Every step matches that of a program that is independent of the package.",
        ("tests/parity/test_parity.py::test_ten_steps_of_ppo_match_the_reference_program",
         "tests/parity/test_sharded_parity.py::test_three_steps_in_float32"),
    ),
    "the command line of the example script": (
        "`camshaft ppo` accepts the same keys and trackers. The name of the module differs.",
        ("tests/unit/config/test_load.py::test_command_line_of_the_specification_is_accepted",
         "tests/smoke/test_ppo_scripts.py"
         "::test_the_command_line_of_the_specification_runs"),
    ),
}  # fmt: skip

METHODS = {"`BaseEngine`": _ENGINE_METHODS, "Features of engines": _FEATURES, "Workers": _WORKERS}


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
    *_under(ROLLOUT, "name temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty"),
    *_under(ROLLOUT, "stop stop_token_ids response_length dtype gpu_memory_utilization ignore_eos"),
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
"""Keys of the specification, including aliases."""

DEVIATES = {
    "data.max_prompt_length": "Prompts are not padded to it.",
    f"{MODEL}.use_remove_padding": "`false` logs a warning and has no effect: batches are never padded.",
    f"{CRITIC}.model.use_remove_padding": "`false` logs a warning and has no effect: batches are never padded.",
    f"{ACTOR}.strategy": (
        "`fsdp` selects FSDP2, and `fsdp1` selects FSDP1. The default is `auto`: `fsdp`, or `reference` for one "
        "process on a CPU."
    ),
    f"{ACTOR}.ppo_mini_batch_size": (
        "Counts prompts, each with `rollout.n` sequences. The default is `data.train_batch_size`."
    ),
    **dict.fromkeys(
        (f"{ROLLOUT}.name", f"{ROLLOUT}.dtype", f"{ROLLOUT}.enforce_eager", "trainer.n_gpus_per_node"),
        "The default is `auto`, which depends on the machine.",
    ),
    f"{ROLLOUT}.tensor_model_parallel_size": "The default is 1, which runs on one device.",
    f"{MODEL}.path": "There is no default.",
    "data.val_files": "The default is null: no validation.",
    "data.train_batch_size": "The default is `auto`: about 256 responses per iteration, or fewer for small data.",
    **dict.fromkeys(("trainer.save_freq", "trainer.test_freq"), "The default is `auto`, a schedule by time."),
    f"{ACTOR}.optim.total_training_steps": "If it is -1, the trainer sets it.",
    f"{ROLLOUT}.top_k": "0 and -1 both disable it, for every rollout.",
    f"{ROLLOUT}.load_format": (
        "With `dummy_...`, vLLM and SGLang start without initial weights; with other values, they load those of the "
        "model folder. In both cases the actor's weights are synced before each generation, as full weights with "
        "every engine. `megatron` and `dummy_megatron` require `actor.strategy=megatron`."
    ),
    **dict.fromkeys(
        (
            f"{ACTOR}.ppo_micro_batch_size",
            f"{REF}.log_prob_micro_batch_size",
            f"{ROLLOUT}.log_prob_micro_batch_size",
            f"{CRITIC}.ppo_micro_batch_size",
            f"{REWARD}.micro_batch_size",
        ),
        "Counts the sequences of one forward pass over all ranks, not on one. The default is null; the default of the "
        "key with the suffix `_per_gpu` is the same on the 8 devices of the specification.",
    ),
    f"{ROLLOUT}.gpu_memory_utilization": (
        "vLLM's meaning: the fraction of the device memory for weights and KV cache together, not of the memory that "
        "the other models leave free."
    ),
    "algorithm.kl_penalty": "Has an effect only with `algorithm.use_kl_in_reward=true`, whose default is false.",
    "algorithm.kl_ctrl.kl_coef": "Has an effect only with `algorithm.use_kl_in_reward=true`, whose default is false.",
    "trainer.logger": "The default is `[console, jsonl]`.",
    "trainer.project_name": "The default is another name.",
    "trainer.total_epochs": "The default is `auto`: 30 only if the number of steps is not set.",
    "trainer.experiment_name": "The default names each run after its model, the swept keys and a number.",
    "trainer.default_hdfs_dir": "The default is null. Any fsspec file system is supported.",
    "data.train_files": (
        "There is no default. Remote files are copied to a cache on disk. `CAMSHAFT_CACHE=/dev/shm/camshaft` keeps the "
        "copies in memory."
    ),
    "trainer.use_legacy_worker_impl": (
        "There is no legacy implementation. `auto`, `disable` and `false` describe what runs, and `enable` "
        "and `true` raise an error."
    ),
}
"""Key -> difference from the specification."""


@dataclass(frozen=True)
class Unimplemented:
    """A value that is rejected as not implemented; an implemented value must be removed from the list."""

    key: str
    value: Any
    missing: str


UNIMPLEMENTED: tuple[Unimplemented, ...] = ()
"""Unimplemented values. `python tests/spec/table.py --strict` fails if there are any."""
