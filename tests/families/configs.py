"""Tiny configs of the model types of the installed transformers.

A type is decoder-only if `AutoModelForCausalLM` has a class for it, and none of these holds:

- its config combines several models, such as a language model with a vision tower;
- it is the decoder of an encoder-decoder model;
- it is an encoder, which is causal only with `is_decoder=True`.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CAUSAL_WITHOUT_KEY = ("gpt_neox", "gpt_neox_japanese")
"""Decoder-only types whose config has `is_decoder=False`, which their models do not read."""
MOST_USED = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2", "phi3", "opt"),
    *("qwen3_moe", "mixtral", "deepseek_v3", "gemma4_text", "gemma2", "gpt_oss"),
)
"""Types that `make test` trains."""
PADDED = ("falcon", "mamba")
"""Types on right-padded rows that `make test` trains: one with attention, and one with a recurrent state."""
VOCABULARY = 64
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size",), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_inner", "ffn_hidden_size", "dim_ff", "dff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "kv_channels", "global_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_dense_layers", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "original_max_position_embeddings"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCABULARY),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "router_hidden_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("dense_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "mamba_n_heads", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), 5),
    **dict.fromkeys(("index_topk", "attention_chunk_size", "floor_scale"), 5),
    "mamba_d_ssm": 64,
    "linear_value_head_dim": 16,
    "zero_expert_num": 1,
}  # fmt: skip
"""Values of config keys, for configs that have the key with a default other than None."""

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
MLA: dict[str, Any] = {"num_key_value_heads": 4}
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3"), MLA),
    **dict.fromkeys(("youtu", "deepseek_v32", "glm_moe_dsa"), MLA),
    "bamba": {"mamba_d_head": "auto", "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "deepseek_v2": {**MLA, "num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "gemma3n_text": {"intermediate_size": 48, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "granitemoehybrid": {"mamba_d_head": "auto", "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**MLA, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1},
        **{"indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2},
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "ministral": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Further values, by model type."""


@cache
def decoder_types() -> tuple[str, ...]:
    """Return the decoder-only types of the installed transformers."""
    return tuple(sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _is_decoder(name)))


def _is_decoder(model_type: str) -> bool:
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:  # a model of several parts, without defaults
        return False
    parts = set(config.sub_configs) - {"attn_config", "ffn_config"}
    if parts or config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        return False
    return getattr(config, "is_decoder", None) is not False or model_type in CAUSAL_WITHOUT_KEY


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a config of a few small layers, with one layer of each kind that the default config has, no dropout."""
    defaults = CONFIG_MAPPING[model_type]().to_dict()
    values = dict(_tiny_values(defaults)) | CHANGES.get(model_type, {})
    return CONFIG_MAPPING[model_type](**values)


def _tiny_values(defaults: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, default in defaults.items():
        if key in SIZES and default is not None:
            yield key, SIZES[key]
        elif key in ("layer_types", "mlp_layer_types") and default:
            yield key, list(dict.fromkeys(default))[:2] * (1 if len(set(default)) > 1 else 2)
        elif isinstance(default, float) and ("drop" in key):
            yield key, 0.0
    yield from {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.items()
