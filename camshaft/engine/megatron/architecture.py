"""Converts the config of a transformers model to Megatron's `TransformerConfig`, and checks that it is supported.

config = transformer_config(hf.config, EngineConfig(...), options)
angles = RotaryAngles(hf)(position_ids)          # (N, 1, 1, D)
"""

# pyright: reportMissingImports=false

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from camshaft.config.backends import MEGATRON
from camshaft.config.engine import EngineConfig
from camshaft.config.schema.megatron import MegatronOptions
from camshaft.errors import EngineError
from camshaft.models.loader import DTYPES

FAMILIES = MEGATRON.families


def transformer_config(hf: PreTrainedConfig, config: EngineConfig, options: MegatronOptions) -> TransformerConfig:
    """Return Megatron's config of a model; raise `EngineError` with all reasons if the model is not supported."""
    text_config = hf.get_text_config()
    _check_supported(text_config, options)
    dtype = DTYPES[options.mixed_precision.param_dtype or config.dtype]
    virtual, set_stages = options.virtual_pipeline_model_parallel_size, options.set_stages()
    if len(set_stages) == options.pipeline_model_parallel_size:
        set_stages.popitem()  # the rest; an interleaved schedule of Megatron requires another stage
    recompute: dict[str, Any] = {}
    if config.model.enable_gradient_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=text_config.num_hidden_layers,
        hidden_size=text_config.hidden_size,
        ffn_hidden_size=text_config.intermediate_size,
        num_attention_heads=text_config.num_attention_heads,
        num_query_groups=text_config.num_key_value_heads,
        kv_channels=head_dim(text_config),
        add_bias_linear=False,
        add_qkv_bias=text_config.model_type == "qwen2",
        qk_layernorm=text_config.model_type in ("qwen3", "qwen3_moe"),
        normalization="RMSNorm",
        layernorm_epsilon=text_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=text_config.attention_dropout,
        hidden_dropout=0.0,
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        sequence_parallel=options.sequence_parallel and options.tensor_model_parallel_size > 1,
        context_parallel_size=options.context_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        **set_stages,
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        moe_token_dispatcher_type="alltoall",  # the only one for micro-batches of different lengths
        variable_seq_lengths=virtual is None,  # micro-batches hold different numbers of tokens
        calculate_per_token_loss=True,  # gradients are summed over micro-batches and ranks, not averaged
        use_cpu_initialization=True,
        cuda_graph_scope=[],  # the default is deprecated
        init_method=_keep,
        output_layer_init_method=_keep,
        # Fused kernels that require Apex or Transformer Engine.
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **recompute,
        **_experts(text_config, options),
    )


def _check_supported(text_config: PreTrainedConfig, options: MegatronOptions) -> None:
    """Raise `EngineError` with all reasons if the model is not supported."""
    if text_config.model_type in FAMILIES:
        problems = [*_unsupported_features(text_config)] or [*_indivisible_sizes(text_config, options)]
    else:
        problems = [f"model_type={text_config.model_type}"]
    if problems:
        raise EngineError(
            f"strategy=megatron does not support this model: {'; '.join(problems)}. It supports models of the types "
            f"{', '.join(FAMILIES)}; set another strategy or other parallel sizes"
        )


def num_experts(text_config: PreTrainedConfig) -> int:
    """Return the number of experts of each layer; 0 for a dense model."""
    return text_config.num_local_experts if text_config.model_type in ("qwen3_moe", "mixtral") else 0


def _experts(text_config: PreTrainedConfig, options: MegatronOptions) -> dict[str, Any]:
    """Return the settings of a mixture-of-experts model."""
    if not num_experts(text_config):
        return {}
    return {
        "num_moe_experts": num_experts(text_config),
        "moe_ffn_hidden_size": getattr(text_config, "moe_intermediate_size", None) or text_config.intermediate_size,
        "moe_router_topk": text_config.num_experts_per_tok,
        # The softmax over the selected experts equals the normalized softmax over all experts.
        "moe_router_pre_softmax": not getattr(text_config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",  # `Router` computes the losses
        "moe_router_dtype": options.moe_router_dtype,
        "expert_model_parallel_size": options.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,  # tensor-parallel ranks process different tokens and hold whole experts
    }


def head_dim(text_config: PreTrainedConfig) -> int:
    """Return the size of one attention head."""
    return getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads


def _keep(weight: Tensor) -> None:
    """Leave a new weight uninitialized, because all weights are loaded."""


def _unsupported_features(text_config: PreTrainedConfig) -> Iterator[str]:
    """Yield config entries that have no counterpart in the Megatron model."""
    values = text_config.to_dict()
    if values.get("hidden_act") != "silu":
        yield f"hidden_act={values.get('hidden_act')}"
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            yield f"{key}=True"
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
        yield "dense layers in a mixture-of-experts model"
    if values.get("router_jitter_noise"):
        yield f"router_jitter_noise={values['router_jitter_noise']}"
    if text_config.model_type == "mixtral" and values.get("sliding_window") is not None:
        yield f"sliding_window={values['sliding_window']}"
    if set(values.get("layer_types") or ()) - {"full_attention"}:
        yield "sliding-window attention"


def _indivisible_sizes(text_config: PreTrainedConfig, options: MegatronOptions) -> Iterator[str]:
    """Yield sizes of the model that the parallel sizes do not divide."""
    tensor = options.tensor_model_parallel_size
    experts, expert_size = num_experts(text_config), options.expert_model_parallel_size
    for key in ("num_attention_heads", "num_key_value_heads", *(() if experts else ("intermediate_size",))):
        if getattr(text_config, key) % tensor:
            yield f"{key}={getattr(text_config, key)} is not divisible by tensor_model_parallel_size={tensor}"
    losses = {"moe_aux_loss_coeff": options.moe_aux_loss_coeff, "moe_z_loss_coeff": options.moe_z_loss_coeff}
    for name, coefficient in losses.items():
        if coefficient and not experts:
            yield f"{name}={coefficient} requires a mixture of experts"
    if experts and tensor > 1 and not options.sequence_parallel:
        yield "sequence_parallel=false is not supported for a tensor-parallel mixture-of-experts model"
    if expert_size > 1 and (not experts or experts % expert_size):
        yield f"{experts} experts cannot be split over expert_model_parallel_size={expert_size} ranks"
    heads, context = text_config.num_attention_heads // tensor, options.context_parallel_size
    if heads % context:
        yield f"{heads} attention heads per rank are not divisible by context_parallel_size={context}"
    yield from _stage_problems(text_config.num_hidden_layers, options)


def _stage_problems(layers: int, options: MegatronOptions) -> Iterator[str]:
    """Yield numbers of layers that do not fill the pipeline stages."""
    virtual, set_stages = options.virtual_pipeline_model_parallel_size or 1, options.set_stages()
    stages, rest = options.pipeline_model_parallel_size - len(set_stages), layers - sum(set_stages.values())
    for name, size in set_stages.items():
        if size % virtual:
            yield f"{name}={size} is not divisible by {virtual} virtual pipeline stages"
    if not set_stages and layers % (stages * virtual):
        yield f"num_hidden_layers={layers} is not divisible by {stages * virtual} pipeline stages"
    elif set_stages and (rest != 0 if stages == 0 else rest < stages * virtual or rest % (stages * virtual)):
        sizes = " and ".join(f"{name}={size}" for name, size in set_stages.items())
        yield f"{sizes} leave {rest} of {layers} layers for {stages * virtual} other pipeline stages"


class RotaryAngles:
    """Rotary angles of a transformers model."""

    def __init__(self, hf: PreTrainedModel):
        config: Any = hf.config.get_text_config()
        parameters = config.to_dict().get("rope_parameters") or {}
        # The rotary module of `hf` may be on the meta device.
        rotary: Any = type(hf.base_model.rotary_emb)(config)
        if parameters.get("rope_type") in ("dynamic", "longrope") or rotary.attention_scaling != 1.0:
            raise EngineError(
                f"strategy=megatron does not support rope_type={parameters.get('rope_type')}, because its angles "
                "depend on the sequence length or are scaled; set another strategy"
            )
        self._frequencies: Tensor = rotary.inv_freq

    def __call__(self, position_ids: Tensor) -> Tensor:
        """Return the angles (N, 1, 1, D) of tokens at positions (N,)."""
        self._frequencies = self._frequencies.to(position_ids.device)
        angles = torch.outer(position_ids.float(), self._frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
