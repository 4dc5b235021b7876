"""Converts the config of a transformers model to Megatron's `TransformerConfig`, and checks that it is supported.

config = transformer_config(hf.config, EngineConfig(...), options)
angles = RotaryAngles(hf)(position_ids)          # (N, 1, 1, D)
"""

# pyright: reportMissingImports=false

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from camshaft.config.backends import MEGATRON
from camshaft.config.engine import EngineConfig
from camshaft.config.schema.megatron import MOE_FAMILIES, MegatronOptions
from camshaft.errors import EngineError
from camshaft.models.attention import config_values
from camshaft.models.loader import DTYPES


def transformer_config(hf: PreTrainedConfig, config: EngineConfig, options: MegatronOptions) -> TransformerConfig:
    """Return Megatron's config of a model; raise `EngineError` with all reasons if the model is not supported."""
    text_config = hf.get_text_config()
    MEGATRON.check_family(options, config_values(hf), config.model)
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


def num_experts(text_config: PreTrainedConfig) -> int:
    """Return the number of experts of each layer; 0 for a dense model."""
    return text_config.num_local_experts if text_config.model_type in MOE_FAMILIES else 0


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
