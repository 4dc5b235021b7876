"""Checks of engines and rollouts against their capabilities; messages have the key and the fix."""

import pytest
from support.optional_engines import OPTIONAL_ENGINES

from camshaft.config import (
    PPOConfig,
    Topology,
    actor_engine,
    backends,
    critic_engine,
    load_ppo,
    load_sft,
    ref_engine,
    rollout_engine,
    sft_engine,
)
from camshaft.config.schema.fsdp import FSDPOptions
from camshaft.engine import engine_class
from camshaft.errors import ConfigError
from camshaft.rollout import rollout_class

ACTOR, REF, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
OWN_ENGINE = "support.own_backends:OwnEngine"
OWN = (f"{ACTOR}.strategy={OWN_ENGINE}", "critic.strategy=fsdp")
BY_ITSELF = (f"{ROLLOUT}.lora_weights=adapter", f"{ROLLOUT}.tensor_model_parallel_size=1")
PER_GPU = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
    f"{REF}.log_prob_micro_batch_size_per_gpu=1",
)


def _error(words, load=load_ppo) -> str:
    with pytest.raises(ConfigError) as caught:
        load(words)
    return str(caught.value)


def _on(words, ranks: int, *more: str) -> list[str]:
    return [*words, f"{ACTOR}.strategy=fsdp", f"trainer.n_gpus_per_node={ranks}", *PER_GPU, *more]


# -- the reference engine -------------------------------------------------------------------------

UNSUPPORTED = [
    "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=Layer",
    "fsdp_config.wrap_policy.min_num_params=100",
    "fsdp_config.fsdp_size=2",
    "fsdp_config.reshard_after_forward=false",
    "fsdp_config.forward_prefetch=true",
    "fsdp_config.tensor_parallel_size=2",
    "fsdp_config.param_offload=true",
    "fsdp_config.grad_offload=true",
    "fsdp_config.optimizer_offload=true",
    "fsdp_config.offload_policy=true",
    "ulysses_sequence_parallel_size=2",
    "use_torch_compile=true",
    "checkpoint.async_save=true",
]


@pytest.mark.parametrize("setting", UNSUPPORTED)
def test_setting_without_an_option_of_the_engine_is_rejected(words, sft_words, setting):
    text = _error([*words, f"{ACTOR}.{setting}"])
    assert "1 error in the config" in text
    assert f"{ACTOR}.{setting.partition('=')[0]} = " in text
    assert f"strategy=reference does not support this key. Set {ACTOR}.strategy=fsdp, or omit" in text
    text = _error([*sft_words, setting], load_sft)
    assert "1 error in the config" in text
    assert "strategy=reference does not support this key. Set strategy=fsdp" in text


@pytest.mark.parametrize("setting", UNSUPPORTED)
def test_unsupported_setting_of_the_critic_names_its_strategy(words, setting):
    setting = setting.replace("fsdp_config", "model.fsdp_config")
    text = _error([*words, f"critic.{setting}"])
    assert "1 error in the config" in text
    assert "strategy=reference does not support this key. Set critic.strategy=fsdp" in text
    load_ppo([*words, f"critic.{setting}", "algorithm.adv_estimator=reinforce_plus_plus"])


def test_activations_cannot_be_offloaded_either(words):
    assert f"{MODEL}.enable_activation_offload = true" in _error([*words, f"{MODEL}.enable_activation_offload=true"])
    text = _error([*words, "critic.model.enable_activation_offload=true"])
    assert "Set critic.strategy=fsdp" in text


def test_setting_inherited_by_the_reference_is_one_problem(words):
    words = [*words, "algorithm.use_kl_in_reward=true"]
    text = _error([*words, f"{ACTOR}.use_torch_compile=true"])
    assert "1 error in the config" in text
    assert f"The same applies to {REF}.use_torch_compile." in text
    assert f"{REF}.fsdp_config.param_offload" in _error([*words, f"{REF}.fsdp_config.param_offload=true"])


@pytest.mark.parametrize(("strategy", "ranks", "is_valid"), [("torchtitan", 2, False), ("megatron", 2, True),
                                                              ("torchtitan", 1, True), ("fsdp", 2, True)])  # fmt: skip
def test_replicas_require_support_by_an_engine_that_shards(words, strategy, ranks, is_valid):
    settings = [*_on(words, ranks), f"{ACTOR}.strategy={strategy}", f"{ACTOR}.fsdp_config.fsdp_size=1"]
    if is_valid:
        load_ppo(settings)
    else:
        assert f"strategy=torchtitan does not support this key. Set {ACTOR}.strategy=fsdp" in _error(settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_engine_computes_in_the_configured_dtype(words, sft_words, dtype):
    key = f"fsdp_config.mixed_precision.param_dtype={dtype}"
    options = {"mixed_precision": {"param_dtype": dtype, "reduce_dtype": "float32"}}
    config = load_ppo([*words, f"{ACTOR}.{key}", f"critic.model.{key}", "algorithm.use_kl_in_reward=true"])
    assert actor_engine(config, Topology(1), 1).options == critic_engine(config, Topology(1), 1).options == options
    assert ref_engine(config, Topology(1)).options["mixed_precision"]["param_dtype"] == dtype
    assert config.actor_rollout_ref.rollout.dtype == dtype
    assert sft_engine(load_sft([*sft_words, key]), 1).options == options


def test_one_process_has_no_reduction_dtype(words):
    text = _error([*words, f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype=bfloat16"])
    assert "1 error in the config" in text
    assert f"Set {ACTOR}.fsdp_config.mixed_precision.reduce_dtype=float32." in text


def test_several_ranks_need_an_engine_for_them(words, sft_words):
    text = _error([*words, "trainer.n_gpus_per_node=8"])
    assert "1 error in the config" in text
    assert f"Set {ACTOR}.strategy=fsdp critic.strategy=fsdp, or trainer.n_gpus_per_node=1." in text
    text = _error([*words, "trainer.n_gpus_per_node=8", f"{ACTOR}.strategy=fsdp", "critic.strategy=reference"])
    assert "Set critic.strategy=fsdp, or" in text
    assert "Set strategy=fsdp, or" in _error([*sft_words, "trainer.n_gpus_per_node=2"], load_sft)
    load_ppo([*words, "trainer.n_gpus_per_node=8", f"{ACTOR}.strategy=fsdp"])
    load_sft([*sft_words, "trainer.n_gpus_per_node=2", "strategy=fsdp2"])


# -- memory and batch arithmetic ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "more", "expected"),
    [
        (
            8,
            [f"{ACTOR}.ulysses_sequence_parallel_size=3"],
            "world_size=8 is not divisible by ulysses_sequence_parallel_size=3 x tensor_parallel_size=1 = 3:"
            " 8 = 2 x 3 + 2. Use ulysses_sequence_parallel_size=2.",
        ),
        (
            1,
            [f"{ACTOR}.fsdp_config.tensor_parallel_size=2"],
            "world_size=1 is not divisible by ulysses_sequence_parallel_size=1 x tensor_parallel_size=2 = 2:"
            " 1 = 0 x 2 + 1. Use tensor_parallel_size=1.",
        ),
        (
            8,
            [f"{ACTOR}.fsdp_config.fsdp_size=3"],
            "world_size=8 is not divisible by fsdp_size=3: 8 = 2 x 3 + 2. Use fsdp_size=2.",
        ),
        (
            8,
            [f"{ACTOR}.fsdp_config.fsdp_size=3", f"{ACTOR}.fsdp_config.tensor_parallel_size=2"],
            "world_size=8 / tensor_parallel_size=2 = 4 is not divisible by fsdp_size=3: 4 = 1 x 3 + 1",
        ),
        (8, ["critic.model.fsdp_config.fsdp_size=5"], "8 = 1 x 5 + 3"),
        (
            8,
            [f"{ACTOR}.fsdp_config.tensor_parallel_size=2", f"{ACTOR}.ulysses_sequence_parallel_size=2"],
            "both shard the attention heads",
        ),
        (
            1,
            [f"{ACTOR}.fsdp_config.offload_policy=true", f"{ACTOR}.fsdp_config.optimizer_offload=true"],
            f"{ACTOR}.fsdp_config.offload_policy = true\n      offload_policy keeps parameters, gradients and",
        ),
        (
            2,
            ["critic.model.fsdp_config.tensor_parallel_size=2", "critic.use_torch_compile=true"],
            "critic.use_torch_compile = true\n      use_torch_compile cannot be combined with tensor_parallel_size=2",
        ),
        (
            1,
            [
                f"{ACTOR}.use_torch_compile=true",
                f"{MODEL}.enable_gradient_checkpointing=true",
                f"{MODEL}.gradient_checkpointing_mode=selective",
            ],
            f"Set {MODEL}.gradient_checkpointing_mode=full, or {ACTOR}.use_torch_compile=false.",
        ),
        (
            1,
            [
                f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=1000",
                f"{MODEL}.enable_gradient_checkpointing=true",
                f"{MODEL}.gradient_checkpointing_mode=selective",
            ],
            "wrap_policy.min_num_params=1000 cannot be combined with gradient_checkpointing_mode=selective",
        ),
    ],
)
def test_invalid_layout_shows_the_division(words, ranks, more, expected):
    text = _error(_on(words, ranks, *more))
    assert "1 error in the config" in text
    assert expected in text


def test_engine_of_another_package_defines_its_layout(words):
    both = [f"{ACTOR}.fsdp_config.tensor_parallel_size=2", f"{ACTOR}.ulysses_sequence_parallel_size=2"]
    stages = f"+{ACTOR}.engine_kwargs.pipeline_stages=2"
    config = load_ppo([*_on(words, 8, *both, stages), *OWN])
    assert config.actor_dp_size(Topology(8)) == 1
    assert config.critic_dp_size(Topology(8)) == 8
    text = _error([*_on(words, 8, stages.replace("=2", "=3")), *OWN])
    assert "1 error in the config" in text
    assert (
        f"{ACTOR}.strategy = {OWN_ENGINE}\n      world_size=8 is not divisible by the model-parallel size 3: "
        "8 = 2 x 3 + 2." in text
    )


def test_options_of_an_engine_are_checked_by_its_schema(words):
    text = _error([*words, *OWN, f"+{ACTOR}.engine_kwargs.pipline_stages=2"])
    assert "1 error in the config" in text
    assert f"{ACTOR}.engine_kwargs.pipline_stages = 2" in text
    assert "unknown option; did you mean 'pipeline_stages'? The options are pipeline_stages, context_parallel" in text
    text = _error([*words, *OWN, f"+{ACTOR}.engine_kwargs.pipeline_stages=0"])
    assert f"{ACTOR}.engine_kwargs.pipeline_stages = 0\n      Input should be greater than or equal to 1." in text
    text = _error([*words, f"+{ACTOR}.engine_kwargs.fsdp_sze=2", f"{ACTOR}.strategy=fsdp"])
    assert "did you mean 'fsdp_size'?" in text
    text = _error([*words, f"+{ACTOR}.engine_kwargs.pipeline_stages=2"])
    assert "unknown option; the options are mixed_precision." in text


def test_option_with_a_config_key_is_rejected_in_engine_kwargs(words, sft_words):
    text = _error([*words, f"{ACTOR}.strategy=fsdp", f"+{ACTOR}.engine_kwargs.param_offload=true"])
    assert "1 error in the config" in text
    assert f"duplicates {ACTOR}.fsdp_config.param_offload. Set that key instead." in text
    text = _error([*sft_words, "strategy=fsdp", "+engine_kwargs.use_torch_compile=true"], load_sft)
    assert "duplicates use_torch_compile." in text


def test_unsupported_features_of_another_packages_engine_are_rejected(words):
    assert "strategy=support.own_backends:OwnEngine does not support LoRA" in _error(
        [*words, *OWN, f"{MODEL}.lora_rank=4"]
    )
    text = _error([*words, *OWN, f"{ACTOR}.fsdp_config.param_offload=true"])
    assert f"strategy={OWN_ENGINE} does not support this key. Set {ACTOR}.strategy=fsdp" in text
    undeclared = f"{ACTOR}.strategy=support.own_backends:UndeclaredEngine"
    load_ppo([*_on(words, 8), undeclared])
    assert "does not support this key" in _error(
        [*_on(words, 8), undeclared, f"{ACTOR}.ulysses_sequence_parallel_size=2"]
    )


VLLM = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1")


@pytest.mark.parametrize("prefix", ["", "dummy_"])
def test_megatron_load_format_requires_a_megatron_actor(words, prefix):
    more = [*words, *VLLM, f"{ROLLOUT}.load_format={prefix}megatron"]
    text = _error([*more, f"{ACTOR}.strategy=fsdp"])
    assert "1 error in the config" in text
    assert f"{ROLLOUT}.load_format = {prefix}megatron\n" in text
    assert f"requires {ACTOR}.strategy=megatron, but {ACTOR}.strategy=fsdp" in text
    assert f"Set {ROLLOUT}.load_format={prefix}dtensor, or {ACTOR}.strategy=megatron." in text
    load_ppo([*more, f"{ACTOR}.strategy=megatron"])
    load_ppo([*words, f"{ROLLOUT}.load_format={prefix}megatron"])  # the rollout `torch` ignores the key


@pytest.mark.parametrize("load_format", ["auto", "hf", "dtensor", "dummy_hf", "dummy_dtensor"])
@pytest.mark.parametrize("strategy", ["fsdp", "megatron", "torchtitan"])
def test_other_load_formats_are_accepted_with_every_engine(words, load_format, strategy):
    load_ppo([*words, *VLLM, f"{ROLLOUT}.load_format={load_format}", f"{ACTOR}.strategy={strategy}"])


def test_engine_class_that_cannot_be_imported_is_rejected(words):
    text = _error([*words, f"{ACTOR}.strategy=no_such_package.engine:Engine"])
    assert "1 error in the config" in text
    assert "the module 'no_such_package' does not exist" in text
    text = _error([*words, f"{ROLLOUT}.name=support.own_backends:NoSuchRollout"])
    assert "has no attribute 'NoSuchRollout'" in text


def test_unknown_engines_are_reported_in_the_order_of_the_roles(words):
    with pytest.raises(ConfigError) as error:
        load_ppo([*words, "actor_rollout_ref.actor.strategy=foo", "critic.strategy=bar"])
    text = str(error.value)
    assert 0 < text.index("actor_rollout_ref.actor.strategy = foo") < text.index("critic.strategy = bar")


def test_capabilities_of_registry_and_classes_agree():
    for name, backend in backends.ENGINES.items():
        if name not in OPTIONAL_ENGINES:
            assert engine_class(name).capabilities is backend.capabilities
    for name, backend in backends.ROLLOUTS.items():
        assert rollout_class(name).capabilities is backend.capabilities


def test_layout_inherited_by_the_reference_is_one_problem(words):
    more = ["algorithm.use_kl_in_reward=true", f"{ACTOR}.ulysses_sequence_parallel_size=3"]
    assert "1 error in the config" in _error(_on(words, 8, *more))
    text = _error(_on(words, 8, *more[:1], f"{REF}.fsdp_config.fsdp_size=3"))
    assert f"{REF}.fsdp_config.fsdp_size = 3" in text


def test_invalid_supervised_layout_shows_the_division(sft_words):
    words = [*sft_words, "strategy=fsdp", "trainer.n_gpus_per_node=6"]
    text = _error([*words, "ulysses_sequence_parallel_size=2", "data.train_batch_size=256"], load_sft)
    assert "256 = 3 groups of 2 ranks x 85 + 1" in text
    load_sft([*words, "ulysses_sequence_parallel_size=2", "data.train_batch_size=255"])
    assert "6 = 1 x 4 + 2" in _error([*words, "fsdp_config.fsdp_size=4", "data.train_batch_size=6"], load_sft)


# -- options passed to engines --------------------------------------------------------------------

EVERYTHING = {
    "wrap_policy.transformer_layer_cls_to_wrap": "Layer",
    "wrap_policy.min_num_params": 7,
    "mixed_precision.param_dtype": "bfloat16",
    "mixed_precision.reduce_dtype": "bfloat16",
    "fsdp_size": 4,
    "reshard_after_forward": False,
    "forward_prefetch": True,
    "param_offload": True,
    "grad_offload": True,
    "optimizer_offload": True,
}
"""Values that differ from the defaults; conflicting options follow below."""
OTHERS = {
    "ulysses_sequence_parallel_size": 2,
    "tensor_parallel_size": 1,
    "offload_policy": False,
    "activation_offload": True,
    "use_torch_compile": True,
    "async_save": True,
}


def _flat(options) -> dict:
    nested = {name: value for name, value in options.items() if isinstance(value, dict)}
    inner = {f"{name}.{key}": value for name, values in nested.items() for key, value in values.items()}
    return {name: value for name, value in options.items() if name not in nested} | inner


def _typed(prefix: str) -> list[str]:
    return [f"{prefix}.{name}={value}" for name, value in EVERYTHING.items()]


def test_every_sharded_engine_option_has_config_keys(words, sft_words):
    actor = [*_typed(f"{ACTOR}.fsdp_config"), f"{ACTOR}.use_torch_compile=true", f"{ACTOR}.checkpoint.async_save=true"]
    actor += [f"{MODEL}.enable_activation_offload=true", f"{ACTOR}.ulysses_sequence_parallel_size=2"]
    config = load_ppo(_on(words, 8, *actor))
    assert _flat(actor_engine(config, Topology(8), 10).options) == EVERYTHING | OTHERS
    critic = [*_typed("critic.model.fsdp_config"), "critic.use_torch_compile=true", "critic.checkpoint.async_save=true"]
    critic += ["critic.model.enable_activation_offload=true", "critic.ulysses_sequence_parallel_size=2"]
    config = load_ppo(_on(words, 8, *critic))
    assert _flat(critic_engine(config, Topology(8), 10).options) == EVERYTHING | OTHERS
    sft = [*_typed("fsdp_config"), "use_torch_compile=true", "checkpoint.async_save=true"]
    sft += [
        "ulysses_sequence_parallel_size=2",
        "model.enable_activation_offload=true",
        "strategy=fsdp",
        "trainer.n_gpus_per_node=8",
    ]
    options = sft_engine(load_sft([*sft_words, *sft]), 10).options
    assert _flat(options) == EVERYTHING | OTHERS
    parsed = FSDPOptions.from_dict(options)
    assert _flat(parsed.model_dump()) == EVERYTHING | OTHERS  # every option has a key


def test_conflicting_options_have_keys(words):
    more = [f"{ACTOR}.fsdp_config.tensor_parallel_size=2", f"{REF}.fsdp_config.offload_policy=true"]
    config = load_ppo(_on(words, 2, *more, "algorithm.use_kl_in_reward=true"))
    assert actor_engine(config, Topology(2), 10).options["tensor_parallel_size"] == 2
    ref = ref_engine(config, Topology(2)).options
    assert (ref["tensor_parallel_size"], ref["offload_policy"]) == (2, True)
    critic = critic_engine(load_ppo(_on(words, 1, "critic.model.fsdp_config.offload_policy=true")), Topology(), 10)
    assert critic.options["offload_policy"] is True


def test_defaults_of_keys_and_engine_agree(words):
    config = load_ppo(_on(words, 1, "algorithm.use_kl_in_reward=true"))
    for options in (
        actor_engine(config, Topology(), 10).options,
        ref_engine(config, Topology()).options,
        critic_engine(config, Topology(), 10).options,
    ):
        assert FSDPOptions.from_dict(options) == FSDPOptions()


def test_reference_inherits_layout_dtype_and_compilation_only(words):
    more = [*_typed(f"{ACTOR}.fsdp_config"), f"{ACTOR}.use_torch_compile=true", "algorithm.use_kl_in_reward=true"]
    more.append(f"{ACTOR}.ulysses_sequence_parallel_size=2")
    ref = FSDPOptions.from_dict(ref_engine(load_ppo(_on(words, 8, *more)), Topology(8)).options)
    assert (ref.mixed_precision.param_dtype, ref.use_torch_compile) == ("bfloat16", True)
    assert (ref.ulysses_sequence_parallel_size, ref.tensor_parallel_size) == (2, 1)
    assert not any((ref.param_offload, ref.grad_offload, ref.optimizer_offload, ref.activation_offload))
    overrides = [
        f"{REF}.fsdp_config.{name}" for name in ("param_offload=true", "fsdp_size=2", "reshard_after_forward=false")
    ]
    ref = FSDPOptions.from_dict(ref_engine(load_ppo(_on(words, 8, *more, *overrides)), Topology(8)).options)
    assert (ref.param_offload, ref.fsdp_size, ref.reshard_after_forward) == (True, 2, False)


def test_engine_options_follow_the_schema(words):
    layout = [f"{ACTOR}.ulysses_sequence_parallel_size=2", f"+{ACTOR}.engine_kwargs.pipeline_stages=2"]
    more = [*layout, "trainer.n_gpus_per_node=4", "algorithm.use_kl_in_reward=true"]
    config = load_ppo([*words, *OWN, *more])
    options = {"ulysses_sequence_parallel_size": 2, "tensor_parallel_size": 1, "pipeline_stages": 2}
    assert actor_engine(config, Topology(4), 10).options == options
    assert ref_engine(config, Topology(4)).options == options
    assert "pipeline_stages" not in critic_engine(config, Topology(4), 10).options
    assert actor_engine(load_ppo(words), Topology(), 10).options.keys() == {"mixed_precision"}


def test_batch_sizes_of_a_role_follow_from_its_ranks(words):
    more = [
        "algorithm.use_kl_in_reward=true",
        f"{ACTOR}.ulysses_sequence_parallel_size=4",
        f"{REF}.ulysses_sequence_parallel_size=2",
        "critic.model.fsdp_config.tensor_parallel_size=8",
        f"{ACTOR}.ppo_micro_batch_size=64",
        f"{ROLLOUT}.log_prob_micro_batch_size=128",
        f"{REF}.log_prob_micro_batch_size=128",
        "critic.ppo_micro_batch_size=64",
    ]
    config = load_ppo([*words, f"{ACTOR}.strategy=fsdp", "trainer.n_gpus_per_node=8", *more])
    # 64 and 128 sequences over 2 ranks of the actor, 128 over 4 of the reference, 64 over 1 of the critic.
    actor, critic = actor_engine(config, Topology(8), 10), critic_engine(config, Topology(8), 10)
    assert (actor.micro_batch_size, actor.infer_micro_batch_size) == (32, 64)
    assert ref_engine(config, Topology(8)).infer_micro_batch_size == 32
    assert critic.micro_batch_size == 64
    assert config.actor_mini_batch_per_rank(Topology(8)) == 128
    assert config.critic_mini_batch_per_rank(Topology(8)) == 256


# -- optimizers and adapters ----------------------------------------------------------------------


def test_unknown_optimizer_is_rejected_without_torch(words, sft_words):
    for load, arguments, key in (
        (load_ppo, words, f"{ACTOR}.optim.optimizer"),
        (load_sft, sft_words, "optim.optimizer"),
    ):
        with pytest.raises(ConfigError, match=rf"{key} = adamw_8bit\n.*Did you mean 'AdamW'\?"):
            load([*arguments, f"{key}=adamw_8bit"])
        load([*arguments, f"{key}=bitsandbytes.optim:AdamW8bit"])


def test_optimizer_has_a_name_and_arguments(words):
    more = [f"{ACTOR}.optim.optimizer=SGD", f"+{ACTOR}.optim.override_optimizer_config.momentum=0.9"]
    config = load_ppo([*words, *more, f"{ACTOR}.optim.lr_scheduler_type=linear", "critic.optim.optimizer=Adafactor"])
    optim = actor_engine(config, Topology(), 10).optim
    assert optim is not None
    assert (optim.optimizer, optim.override_optimizer_config) == ("SGD", {"momentum": 0.9})
    assert optim.lr_scheduler_type == "linear"
    critic = critic_engine(config, Topology(), 10).optim
    assert critic is not None
    assert critic.optimizer == "Adafactor"


def _lora(config: PPOConfig):
    return actor_engine(config, Topology(), 10).model.lora


def test_lora_rank_enables_the_adapter(words, tmp_path):
    assert _lora(load_ppo(words)) is None
    lora = _lora(load_ppo([*words, f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8"]))
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules, lora.exclude_modules) == (4, 8, "all-linear", ())
    (tmp_path / "adapter").mkdir()
    more = [f"{MODEL}.target_modules=[q_proj,v_proj]", f"{MODEL}.exclude_modules=lm_head"]
    lora = _lora(load_ppo([*words, f"{MODEL}.lora_rank=4", *more, f"{MODEL}.lora_adapter_path={tmp_path}/adapter"]))
    assert lora is not None
    assert (lora.target_modules, lora.exclude_modules) == (("q_proj", "v_proj"), ("lm_head",))
    assert lora.adapter_path == f"{tmp_path}/adapter"
    config = load_ppo([*words, "critic.model.lora_rank=2", f"{MODEL}.gradient_checkpointing_mode=selective"])
    critic = critic_engine(config, Topology(), 10).model
    assert critic.lora is not None
    assert (critic.lora.rank, critic.gradient_checkpointing_mode) == (2, "full")
    actor = actor_engine(config, Topology(), 10).model
    assert (actor.lora, actor.gradient_checkpointing_mode) == (None, "selective")


def test_rollout_config_has_a_separately_synced_adapter(words):
    adapter = [f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{ROLLOUT}.name=vllm", *BY_ITSELF]
    assert rollout_engine(load_ppo([*words, *adapter])).lora == _lora(load_ppo([*words, *adapter]))
    assert rollout_engine(load_ppo([*words, *adapter, f"{ROLLOUT}.lora_weights=merged"])).lora is None
    assert (
        rollout_engine(load_ppo([*words, *adapter, f"{ROLLOUT}.name=support.own_backends:OwnRollout"])).lora is not None
    )


def test_reference_is_no_separate_model_with_an_adapter(words):
    config = load_ppo([*words, "algorithm.use_kl_in_reward=true", f"{MODEL}.lora_rank=4"])
    assert (config.kl_plan().is_used, config.kl_plan().needs_model) == (True, False)
    shared = (f"{MODEL}.lora_rank=4", "algorithm.use_kl_in_reward=true", f"{ACTOR}.ulysses_sequence_parallel_size=2")
    config = load_ppo(_on(words, 4, *shared))
    assert config.ref_dp_size(Topology(4)) == config.actor_dp_size(Topology(4)) == 2
    text = _error(_on(words, 4, *shared, f"{REF}.ulysses_sequence_parallel_size=1"))
    assert "1 error in the config" in text
    assert "the reference is the actor's engine with its adapter disabled" in text


@pytest.mark.parametrize(
    ("switch", "key"),
    [
        ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty"),
        (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type"),
    ],
)
@pytest.mark.parametrize("size", ["ulysses_sequence_parallel_size", "fsdp_config.tensor_parallel_size"])
def test_exact_kl_requires_equal_layouts_of_actor_and_reference(words, switch, key, size):
    cut, other = f"{ACTOR}.{size}=2", f"{REF}.{size}=1"
    load_ppo(_on(words, 4, switch, f"{key}=full", cut, f"{REF}.{size}=2"))
    text = _error(_on(words, 4, switch, f"{key}=full", cut, other))
    assert "1 error in the config" in text
    assert f"{key}=full requires the same layout" in text
    assert f"Omit the key, or set {ACTOR}.{size}=1." in text
    load_ppo(_on(words, 4, switch, f"{key}=abs", cut, other))  # other estimators allow different layouts
    load_ppo(_on(words, 4, f"{key}=full", cut, other))  # without a KL term nothing is compared


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([f"{MODEL}.lora_adapter_path=/"], f"Set {MODEL}.lora_rank to the rank of the adapter."),
        ([f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=[]"], f"Set {MODEL}.target_modules=all-linear."),
        ([f"{MODEL}.lora_rank=4", f"{MODEL}.lora_adapter_path=/nowhere"], "folder not found"),
        (["critic.model.lora_rank=4", "critic.model.lora_adapter_path=/nowhere"], "folder not found"),
        ([f"{MODEL}.lora_rank=-1"], "an integer >= 0"),
        (
            [f"{MODEL}.lora_rank=4", f"{ACTOR}.fsdp_config.tensor_parallel_size=2", *_on([], 2)],
            "LoRA is not supported with tensor_parallel_size=2",
        ),
        (
            [f"{ROLLOUT}.name=vllm", *BY_ITSELF],
            f"{MODEL}.lora_rank=0, because there is no adapter. Set {ROLLOUT}.lora_weights=merged.",
        ),
        *(
            (
                [f"{MODEL}.lora_rank=4", f"{ROLLOUT}.name={name}", *BY_ITSELF],
                f"name={name} does not support separate LoRA",
            )
            for name in ("hf", "process", "server", "sglang", "torch")
        ),
        ([f"{MODEL}.lora_rank=4", f"{ROLLOUT}.lora_weights=both"], "must be one of merged, adapter"),
    ],
)
def test_invalid_adapter_settings_are_rejected(words, more, expected):
    text = _error([*words, *more])
    assert "1 error in the config" in text
    assert expected in text


def test_device_may_be_any_name(words, sft_words):
    assert load_ppo([*words, "trainer.device=npu"]).trainer.device == "npu"
    assert load_sft([*sft_words, "trainer.device=xpu"]).trainer.device == "xpu"


def test_engines_without_the_router_loss_reject_its_coefficient(words):
    text = _error([*words, f"{ACTOR}.strategy=torchtitan", f"{MODEL}.router_aux_loss_coef=0.001"])
    expected = f"strategy=torchtitan does not support the router auxiliary loss. Set {MODEL}.router_aux_loss_coef=0, or"
    assert expected in text
    load_ppo([*words, f"{MODEL}.router_aux_loss_coef=0.001"])


SAMPLING_VALUES = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}


@pytest.mark.parametrize("section", [ROLLOUT, f"{ROLLOUT}.val_kwargs"])
@pytest.mark.parametrize("name", SAMPLING_VALUES)
def test_sampling_requires_a_rollout_that_declares_it(section: str, name: str, words: list[str]) -> None:
    value = SAMPLING_VALUES[name]
    load_ppo([*words, f"{ROLLOUT}.name=torch", f"{section}.{name}={value}"])
    process = [*words, f"{ROLLOUT}.name=process", f"{section}.{name}={value}"]
    load_ppo([*process, f"+{ROLLOUT}.engine_kwargs.rollout=torch"])
    with pytest.raises(ConfigError, match=rf"(?s){section}.{name} = {value}.*not supported by {ROLLOUT}.name=process"):
        load_ppo([*process, f"+{ROLLOUT}.engine_kwargs.rollout=sglang"])


def test_an_unknown_rollout_inside_a_process_is_an_error(words: list[str]) -> None:
    text = _error([*words, f"{ROLLOUT}.name=process", f"+{ROLLOUT}.engine_kwargs.rollout=tortch"])
    assert f"{ROLLOUT}.engine_kwargs.rollout = tortch" in text
    assert "torch" in text.partition("tortch")[2]


def test_options_of_the_rollout_inside_a_process_are_checked(words: list[str]) -> None:
    text = _error([*words, f"{ROLLOUT}.name=process", f"+{ROLLOUT}.engine_kwargs.speed=9"])
    assert "speed" in text
