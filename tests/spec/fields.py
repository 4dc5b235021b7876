"""Keys that set a field of an engine, a rollout or its sampling, and the tests of each field.

    FIELDS["critic.optim.lr"]               # Field("critic", "optim.lr", 0.25)
    FIELD_TESTS["engine"]["optim.lr"]       # tests of the field, on any engine

`test_fields.py` sets each key and compares the field with the expected value; the tests in `FIELD_TESTS` show the
effect of the field. Keys of different roles set the same field of their engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
REF, ROLLOUT = "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
CRITIC, REWARD = "critic", "reward_model"


@dataclass(frozen=True)
class Field:
    """If the key has the value `typed`, the field `field` of the config of `part` is `result`."""

    part: str
    field: str
    typed: Any
    result: Any = None
    """None: the typed value."""
    others: Mapping[str, Any] = dataclass_field(default_factory=dict)
    """Further keys that this one requires."""

    @property
    def expected(self) -> Any:
        return self.typed if self.result is None else self.result

    @property
    def kind(self) -> str:
        """Return the key of `FIELD_TESTS` for this part."""
        return {"rollout": "rollout", "sampling": "sampling", "validation": "sampling"}.get(self.part, "engine")


def _fields(part: str, prefix: str, rows: Mapping[str, tuple[Any, ...]]) -> dict[str, Field]:
    """Build fields from rows of `Field` arguments without the part; keys in `others` are relative to the section."""
    fields = {}
    for name, (path, typed, *rest) in rows.items():
        result, others = [*rest, *(None, {})[len(rest) :]]
        fields[f"{prefix}.{name}"] = Field(
            part, path, typed, result, {f"{prefix}.{key}": others[key] for key in others}
        )
    return fields


_MODEL: dict[str, tuple[Any, ...]] = {
    "external_lib": ("model.external_lib", "my_lib"),
    "override_config": ("model.override_config", {"attention_dropout": 0.5}),
    "trust_remote_code": ("model.trust_remote_code", True),
}
_TRAINED_MODEL: dict[str, tuple[Any, ...]] = {
    **_MODEL,
    "enable_gradient_checkpointing": ("model.enable_gradient_checkpointing", True),
    "gradient_checkpointing_mode": ("model.gradient_checkpointing_mode", "selective"),
    "enable_activation_offload": ("options.activation_offload", True),
    "use_prefix_grouper": ("model.use_prefix_grouper", False),
    "lora_rank": ("model.lora.rank", 4),
    "router_aux_loss_coef": ("model.router_aux_loss_coef", 0.5),
}
_LORA: dict[str, tuple[Any, ...]] = {
    "lora_alpha": ("model.lora.alpha", 3, None, {"lora_rank": 4}),
    "target_modules": ("model.lora.target_modules", ("q_proj",), None, {"lora_rank": 4}),
    "exclude_modules": ("model.lora.exclude_modules", ("v_proj",), None, {"lora_rank": 4}),
    "lora_adapter_path": ("model.lora.adapter_path", "{folder}/adapter", None, {"lora_rank": 4}),
}
_OPTIM: dict[str, tuple[Any, ...]] = {
    "optimizer": ("optim.optimizer", "SGD"),
    "override_optimizer_config": ("optim.override_optimizer_config", {"momentum": 0.5}),
    "lr": ("optim.lr", 0.25),
    "betas": ("optim.betas", (0.5, 0.75)),
    "weight_decay": ("optim.weight_decay", 0.5),
    "lr_warmup_steps": ("optim.lr_warmup_steps", 7),
    "lr_warmup_steps_ratio": ("optim.lr_warmup_steps", 0.5, 50),
    "min_lr_ratio": ("optim.min_lr_ratio", 0.5),
    "num_cycles": ("optim.num_cycles", 2.5),
    "lr_scheduler_type": ("optim.lr_scheduler_type", "cosine"),
    "total_training_steps": ("optim.total_training_steps", 40),
}
_FORWARD: dict[str, tuple[Any, ...]] = {
    "wrap_policy.transformer_layer_cls_to_wrap": ("options.wrap_policy.transformer_layer_cls_to_wrap", "Layer"),
    "wrap_policy.min_num_params": ("options.wrap_policy.min_num_params", 7),
    "fsdp_size": ("options.fsdp_size", 2),
    "reshard_after_forward": ("options.reshard_after_forward", False),
    "forward_prefetch": ("options.forward_prefetch", True),
    "tensor_parallel_size": ("options.tensor_parallel_size", 2),
    "param_offload": ("options.param_offload", True),
    "offload_policy": ("options.offload_policy", True),
    "model_dtype": ("dtype", "float64"),
    "mixed_precision.param_dtype": ("options.mixed_precision.param_dtype", "bfloat16"),
}
_TRAINED: dict[str, tuple[Any, ...]] = {
    **_FORWARD,
    "grad_offload": ("options.grad_offload", True),
    "optimizer_offload": ("options.optimizer_offload", True),
    "mixed_precision.reduce_dtype": ("options.mixed_precision.reduce_dtype", "bfloat16"),
}
_BESIDE: dict[str, tuple[Any, ...]] = {
    "ulysses_sequence_parallel_size": ("options.ulysses_sequence_parallel_size", 2),
    "use_torch_compile": ("options.use_torch_compile", True),
}
_UPDATES: dict[str, tuple[Any, ...]] = {
    **_BESIDE,
    "checkpoint.async_save": ("options.async_save", True),
    "grad_clip": ("grad_clip", 0.5),
    "ppo_micro_batch_size": ("micro_batch_size", 8, 2),  # over four ranks
    "ppo_micro_batch_size_per_gpu": ("micro_batch_size", 3),
    "use_dynamic_bsz": ("micro_batch_size", False, 8, {}),
    "ppo_max_token_len_per_gpu": ("max_tokens", 4000, None, {"use_dynamic_bsz": True}),
}
_LOG_PROBS: dict[str, tuple[Any, ...]] = {
    "log_prob_micro_batch_size": ("infer_micro_batch_size", 8, 2),
    "log_prob_micro_batch_size_per_gpu": ("infer_micro_batch_size", 3),
    "log_prob_use_dynamic_bsz": ("infer_micro_batch_size", False, 16, {}),
    "log_prob_max_token_len_per_gpu": ("infer_max_tokens", 4000, None, {"log_prob_use_dynamic_bsz": True}),
}
_GENERATOR: dict[str, tuple[Any, ...]] = {
    "dtype": ("dtype", "float32"),
    "gpu_memory_utilization": ("gpu_memory_utilization", 0.25),
    "enforce_eager": ("enforce_eager", False),
    "free_cache_engine": ("free_cache_engine", False),
    "load_format": ("load_format", "auto"),
    "tensor_model_parallel_size": ("tensor_model_parallel_size", 4),
    "enable_prefix_caching": ("enable_prefix_caching", False),
    "update_weights_bucket_megabytes": ("update_weights_bucket_megabytes", 8),
    "max_num_batched_tokens": ("max_num_batched_tokens", 99),
    "max_num_seqs": ("max_num_seqs", 9),
    "engine_kwargs": ("engine_kwargs", {"seed": 3}),
    "prompt_length": ("max_model_len", 600, 600 + 512),
}
_VALIDATION: dict[str, tuple[Any, ...]] = {
    "do_sample": ("do_sample", True, None, {"temperature": 0.5}),
    "temperature": ("temperature", 0.5),
    "top_k": ("top_k", 5),
    "top_p": ("top_p", 0.5),
    "min_p": ("min_p", 0.1),
    "repetition_penalty": ("repetition_penalty", 1.5),
    "presence_penalty": ("presence_penalty", 0.5),
    "frequency_penalty": ("frequency_penalty", -0.5),
    "stop": ("stop", ("###",)),
    "stop_token_ids": ("stop_token_ids", (7,)),
}

_OWN_ENGINE = {f"{ACTOR}.strategy": "support.own_backends:OwnEngine"}
_OWN_OPTION = ("options.pipeline_stages", {"pipeline_stages": 2}, 2, _OWN_ENGINE)

FIELDS: dict[str, Field] = {
    f"{ACTOR}.engine_kwargs": Field("actor", *_OWN_OPTION),
    f"{REF}.engine_kwargs": Field("ref", *_OWN_OPTION),
    f"{CRITIC}.engine_kwargs": Field("critic", *_OWN_OPTION),
    f"{REWARD}.engine_kwargs": Field("reward", *_OWN_OPTION),
    "data.max_response_length": Field("sampling", "max_tokens", 9),
    f"{MODEL}.path": Field("actor", "model.path", "{folder}/other"),
    **_fields("actor", MODEL, _TRAINED_MODEL | _LORA),
    f"{MODEL}.random_init": Field("actor", "model.random_init", True),
    **_fields("actor", f"{ACTOR}.optim", _OPTIM),
    **_fields("actor", f"{ACTOR}.fsdp_config", _TRAINED),
    **_fields("actor", ACTOR, _UPDATES),
    **_fields("ref", f"{REF}.fsdp_config", _FORWARD),
    **_fields("ref", REF, _BESIDE | _LOG_PROBS),
    **_fields("actor", ROLLOUT, _LOG_PROBS),
    **_fields("rollout", ROLLOUT, _GENERATOR),
    f"{ROLLOUT}.enable_return_routed_experts": Field(
        "rollout", "enable_return_routed_experts", True, None,
        {f"{ROLLOUT}.name": "torch", f"{ROLLOUT}.tensor_model_parallel_size": 1},
    ),
    f"{ROLLOUT}.lora_weights": Field("rollout", "lora.rank", "adapter", 4, {f"{MODEL}.lora_rank": 4}),
    **_fields("sampling", ROLLOUT, _VALIDATION | {
        "do_sample": ("do_sample", False),
        "ignore_eos": ("ignore_eos", True),
        "response_length": ("max_tokens", 9),
    }),
    **_fields("validation", f"{ROLLOUT}.val_kwargs", _VALIDATION),
    f"{CRITIC}.model.path": Field("critic", "model.path", "{folder}/other"),
    **_fields("critic", f"{CRITIC}.model", _TRAINED_MODEL | _LORA),
    **_fields("critic", f"{CRITIC}.optim", _OPTIM),
    **_fields("critic", f"{CRITIC}.model.fsdp_config", _TRAINED),
    **_fields("critic", CRITIC, _UPDATES | {
        "forward_micro_batch_size": ("infer_micro_batch_size", 8, 2),
        "forward_micro_batch_size_per_gpu": ("infer_micro_batch_size", 3),
        "forward_max_token_len_per_gpu": ("infer_max_tokens", 4000, None, {"use_dynamic_bsz": True}),
    }),
    f"{REWARD}.model.path": Field("reward", "model.path", "{folder}/other"),
    **_fields("reward", f"{REWARD}.model", _MODEL),
    **_fields("reward", f"{REWARD}.model.fsdp_config", _FORWARD),
    **_fields("reward", REWARD, _BESIDE | {
        "micro_batch_size": ("infer_micro_batch_size", 8, 2),
        "micro_batch_size_per_gpu": ("infer_micro_batch_size", 3),
        "use_dynamic_bsz": ("infer_micro_batch_size", False, 8, {}),
        "forward_max_token_len_per_gpu": ("infer_max_tokens", 4000, None, {"use_dynamic_bsz": True}),
    }),
    "trainer.device": Field("actor", "device", "cuda"),
}  # fmt: skip

_LOADER, _LORAS, _PACKED = (f"tests/unit/models/test_{name}.py" for name in ("loader", "lora", "packed"))
_OPTIMS, _OPTIONS = "tests/unit/engine/test_optim.py", "tests/unit/engine/fsdp/test_options.py"
_RULE = "tests/contracts/test_engine_contract.py::test_engine_keeps_rule"
_GENERATES = "tests/contracts/test_rollout_contract.py::test_rollout_keeps_rule"
_BORROWED, _LIBRARIES = "tests/unit/rollout/test_shared_model.py", "tests/spec/test_library_keys.py"

FIELD_TESTS: dict[str, dict[str, tuple[str, ...]]] = {
    "engine": {
        "model.path": (f"{_LOADER}::test_weights_match_the_folder", f"{_RULE}[fsdp-predictions]"),
        "model.external_lib": (f"{_LOADER}::test_external_lib_is_imported_before_the_model_is_built",),
        "model.override_config": (f"{_LOADER}::test_override_config_changes_the_model",),
        "model.trust_remote_code": (
            "tests/unit/checkpoint/test_export.py::test_trusted_custom_model_code_is_exported",
        ),
        "model.enable_gradient_checkpointing": (f"{_PACKED}::test_gradient_checkpointing_computes_layers_again",),
        "model.gradient_checkpointing_mode": (
            "tests/unit/models/test_activations.py"
            "::test_selective_checkpointing_recomputes_no_matrix_product",
        ),
        "model.use_prefix_grouper": (
            "tests/unit/engine/test_prefix_sharing.py"
            "::test_the_model_computes_a_prompt_once_unless_disabled",
        ),
        "model.router_aux_loss_coef": (
            "tests/unit/engine/test_routing.py"
            "::test_auxiliary_loss_equals_that_of_transformers_in_every_split",
        ),
        "model.random_init": (f"{_LOADER}::test_random_init_depends_only_on_the_seed",),
        "model.lora.rank": (f"{_LORAS}::test_log_probs_and_gradients_match_peft",),
        "model.lora.alpha": (f"{_LORAS}::test_log_probs_and_gradients_match_peft",),
        "model.lora.target_modules": (f"{_LORAS}::test_targets_and_exclusions_are_endings_of_names",),
        "model.lora.exclude_modules": (f"{_LORAS}::test_targets_and_exclusions_are_endings_of_names",),
        "model.lora.adapter_path": (
            "tests/unit/engine/test_reference_lora.py::test_an_exported_adapter_initializes_another_engine",
        ),
        "optim.optimizer": (f"{_OPTIMS}::test_an_optimizer_class_receives_only_supported_arguments",),
        "optim.override_optimizer_config": (f"{_OPTIMS}::test_overrides_win_and_lists_become_tuples",),
        "optim.lr": (f"{_OPTIMS}::test_first_adamw_update_by_hand",),
        "optim.betas": (f"{_OPTIMS}::test_the_default_optimizer_is_adamw_with_config_values",),
        "optim.weight_decay": (f"{_OPTIMS}::test_first_adamw_update_by_hand",),
        "optim.lr_warmup_steps": (f"{_OPTIMS}::test_warm_up_rises_from_above_zero_to_the_full_rate",),
        "optim.min_lr_ratio": (f"{_OPTIMS}::test_cosine_decays_from_the_full_rate_to_the_minimum",),
        "optim.num_cycles": ("tests/spec/test_engine_keys.py::test_num_cycles_is_the_number_of_cosine_cycles",),
        "optim.lr_scheduler_type": (f"{_OPTIMS}::test_linear_schedule_decays_from_full_rate_to_minimum",),
        "optim.total_training_steps": (f"{_OPTIMS}::test_cosine_decays_from_the_full_rate_to_the_minimum",),
        "grad_clip": (f"{_RULE}[fsdp-norm_is_before_clipping]",),
        "dtype": ("tests/spec/test_engine_keys.py::test_weights_have_the_configured_dtype",),
        "device": ("tests/spec/test_engine_keys.py::test_model_is_built_on_the_configured_device",),
        "micro_batch_size": ("tests/spec/test_engine_keys.py::test_micro_batch_size_limits_the_rows_of_a_pass",),
        "max_tokens": (f"{_RULE}[fsdp-token_budget_is_hard]",),
        "infer_micro_batch_size": (f"{_RULE}[fsdp-hooks]",),
        "options.pipeline_stages": (
            "tests/unit/config/test_backend_checks.py::test_engine_of_another_package_defines_its_layout",
            "tests/unit/config/test_backend_checks.py::test_options_of_an_engine_are_checked_by_its_schema",
        ),
        "infer_max_tokens": ("tests/spec/test_engine_keys.py::test_max_tokens_limits_the_tokens_of_a_pass",),
        **{
            f"options.{name}": (f"{_OPTIONS}::{test}",)
            for test, names in {
                "test_units_are_layers_or_modules_by_class_or_size": (
                    "wrap_policy.transformer_layer_cls_to_wrap", "wrap_policy.min_num_params",
                ),
                "test_gathered_weights_are_freed_or_kept_after_forward": ("reshard_after_forward",),
                "test_the_next_layer_is_prefetched": ("forward_prefetch",),
                "test_layers_compute_in_the_configured_dtype": ("mixed_precision.param_dtype",),
                "test_gradients_are_reduced_in_the_configured_dtype": ("mixed_precision.reduce_dtype",),
                "test_offloaded_parts_match_the_config": (
                    "param_offload", "grad_offload", "optimizer_offload",
                ),
                "test_with_the_policy_units_live_in_host_memory": ("offload_policy",),
                "test_activations_of_a_training_step_are_offloaded": ("activation_offload",),
                "test_each_layer_is_compiled": ("use_torch_compile",),
                "test_a_checkpoint_is_written_in_the_background": ("async_save",),
                "test_ranks_share_weights_and_rows_by_config": (
                    "fsdp_size", "ulysses_sequence_parallel_size", "tensor_parallel_size",
                ),
            }.items()
            for name in names
        },
    },
    "rollout": {
        "dtype": (f"{_BORROWED}::test_weights_of_another_dtype_are_copied_and_rounded",),
        "free_cache_engine": (
            "tests/unit/rollout/builtin/test_rollout.py::test_sleep_frees_the_kv_cache_unless_configured",
        ),
        "enable_return_routed_experts": (
            "tests/unit/rollout/builtin/test_routed_experts.py::test_generator_returns_the_choices_of_transformers",
        ),
        "max_num_seqs": ("tests/unit/rollout/test_hf.py::test_a_batch_has_at_most_max_num_seqs_rows",),
        "max_num_batched_tokens": (
            "tests/unit/rollout/test_hf.py::test_padded_prompt_tokens_of_a_batch_respect_the_limit",
        ),
        "max_model_len": (f"{_GENERATES}[torch-max_model_len_ends_a_row]",),
        "engine_kwargs": (f"{_BORROWED}::test_engine_kwargs_are_for_other_generators",),
        "lora.rank": (
            "tests/unit/rollout/test_vllm_rollout.py::test_adapter_arguments_have_rank_and_layers",
            "tests/unit/reshard/test_adapters.py::test_the_base_is_sent_once_and_the_adapter_each_time",
        ),
        "update_weights_bucket_megabytes": (f"{_LIBRARIES}::test_weight_buckets_have_the_configured_size",),
        "enforce_eager": (
            f"{_LIBRARIES}::test_key_reaches_the_library",
            "tests/unit/rollout/builtin/test_graphs.py::test_graphs_are_captured_on_a_gpu_by_config",
        ),
        **dict.fromkeys(
            ("gpu_memory_utilization", "load_format", "tensor_model_parallel_size", "enable_prefix_caching"),
            (f"{_LIBRARIES}::test_key_reaches_the_library",),
        ),
    },
    "sampling": {
        "temperature": (f"{_GENERATES}[torch-log_probs_match_the_distribution]",),
        "top_k": (f"{_GENERATES}[torch-log_probs_match_the_distribution]",),
        "top_p": (f"{_GENERATES}[torch-log_probs_match_the_distribution]",),
        **dict.fromkeys(
            ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
            (f"{_GENERATES}[torch-optional_sampling_is_applied_or_rejected]",),
        ),
        "stop": (f"{_GENERATES}[torch-stop_strings_end_a_row]",),
        "stop_token_ids": (f"{_GENERATES}[torch-rows_end]",),
        "do_sample": ("tests/unit/rollout/test_base.py::test_temperature_zero_or_do_sample_off_is_greedy",),
        "ignore_eos": (f"{_GENERATES}[torch-rows_end]",),
        "max_tokens": (f"{_GENERATES}[torch-rows_end]",),
    },
}  # fmt: skip
"""Part -> field of its config -> tests that fail if the field does nothing."""
