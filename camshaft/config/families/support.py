"""Features that a family of models lacks, by the values of its config.json; it imports neither torch nor transformers.

    values = text_values(content)               # of a config.json, or of `to_dict()` of a config of transformers
    unsupported("packed rows", values)          # ["a recurrent state"]
    unsupported("prefix sharing", values)       # ["a sliding window (sliding_window=4096)"]

A feature is supported if there is no reason against it. What the values of a config do not show, such as attention code
that does not use the attention interface of transformers, is known by model type, for the tested version of
transformers. Models of other types are also checked when they are built (`models/packed.py`).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from camshaft.config.guards import is_list, is_mapping

Feature = Literal["packed rows", "training", "fused log-probs", "prefix sharing", "sequence parallelism"]
"""Features that depend on the model. "packed rows" is the form in which engines and the built-in rollout call models of
transformers; "training" is supported if an engine can call them on packed or on right-padded rows; "fused log-probs" is
the output layer of causal language models."""

SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
"""Model types whose layers have attention sinks."""

SPARSE = ("hy_v4",)
"""Model types whose layers select the tokens to which a token attends, although their config lists full attention."""

DROPS_ARGUMENTS = ("nemotron",)
"""Model types whose layers do not pass the arguments of a call to their attention."""

STATE = "a recurrent state"

RECURRENT = (
    *("bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "mamba"),
    *("mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
)
"""Model types with a recurrent state, which leaks between packed rows unless their layers are in `RESETS_STATE`."""

RESETS_STATE = ("kimi_linear", "minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types with linear attention whose state is empty at the start of every packed row (`models/recurrent.py`)."""

COMPOSITE = ("gemma3", "qwen3_5", "qwen3_5_moe")
"""Model types with a language model that is trained, and other parts that are kept (`models/composite.py`)."""

OWN_ATTENTION = (
    *("bart", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "bloom", "blt", "codegen"),
    *("cpmant", "falcon", "git", "gpt_neo", "gpt_neox_japanese", "gptj", "inkling_text", "marian", "mbart"),
    *("megatron-bert", "mpt", "musicgen", "musicgen_melody", "mvp", "openai-gpt", "pegasus", "plbart", "prophetnet"),
    *("reformer", "rembert", "roformer", "stablelm", "trocr", "whisper", "xglm", "xlm", "xlnet"),
)
"""Model types without a recurrent state whose attention does not use the attention interface of transformers."""

NOT_CAUSAL = ("cpmant", "xlm", "xlnet")
"""Model types whose tokens attend to later tokens."""

PADDED = (
    *("axk2", "bamba", "biogpt", "bloom", "codegen", "deepseek_v32", "deepseek_v4", "doge", "falcon", "falcon_h1"),
    *("falcon_mamba", "glm_moe_dsa", "gpt_neo", "gpt_neox_japanese", "gptj", "granitemoehybrid", "hy_v4"),
    *("inkling_text", "jamba", "llama4_text", "lfm2", "lfm2_moe", "mamba", "mamba2", "mpt", "nemotron", "nemotron_h"),
    *("openai-gpt", "qwen4_exp_text", "recurrent_gemma", "rwkv", "stablelm", "xglm", "xlstm", "zamba", "zamba2"),
    *("zaya",),
)
"""Causal model types that engines call on right-padded rows if packed rows do not support them."""

LOGIT_FACTORS = {
    "cohere": ("logit_scale", 1),
    "cohere2": ("logit_scale", 1),
    "cohere2_moe": ("logit_scale", 1),
    "granite": ("logits_scaling", -1),
    "granitemoe": ("logits_scaling", -1),
    "granitemoeshared": ("logits_scaling", -1),
    "granitemoehybrid": ("logits_scaling", -1),
    "falcon_h1": ("lm_head_multiplier", 1),
    "inkling_text": ("logits_mup_width_multiplier", -1),
    "minicpm3": ("logits_scaling", -1),
}
"""Model types that scale their logits by a config value: (config key, 1 to multiply or -1 to divide)."""

LOGIT_SOFTCAPS = {
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"), "final_logit_softcapping"),
    **dict.fromkeys(("nanochat", "vaultgemma"), "final_logit_softcapping"),
    "recurrent_gemma": "logits_soft_cap",
    "xlstm": "output_logit_soft_cap",
}
"""Model types that limit their logits with a soft-cap, with its config key."""

LOGIT_KEYS = re.compile(r"^(final_|output_)?logits?_(soft_?cap|scal|mup)|^lm_head_mult|^unpadded_vocab")
"""Matches the config keys of models that change their logits after the output layer."""

ROPE_BY_MAX_POSITION = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Types of rotary embeddings that depend on the largest position of a call, with the config key of their limit."""

MAX_HEAD_DIM = 256
"""Largest head dimension of the flash kernels, and of prefix sharing."""

INSTEAD = {"cpmant": "qwen2", "xlm": "gpt2", "xlnet": "gpt2"}
"""Supported model types of about the same size, by refused type."""


class RopeLimit(NamedTuple):
    """Number of tokens above which one row changes the rotary frequencies of all rows of a call."""

    rope_type: str
    tokens: int
    key: str
    """Config key of the limit."""


def text_values(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of the language model in the content of a config.json, which may combine several models."""
    text = content.get("text_config")
    return {**content, **text} if is_mapping(text) else content


def unsupported(feature: Feature, values: Mapping[str, Any]) -> list[str]:
    """Return the reasons why models with these values do not support `feature`: noun phrases for "they have ..."."""
    return list(_REASONS[feature](values))


def runs_padded(values: Mapping[str, Any]) -> bool:
    """Return True if engines call models with these values on right-padded rows (`models/padded_rows.py`)."""
    return values.get("model_type") in PADDED and bool(unsupported("packed rows", values))


def refusal(feature: Feature, values: Mapping[str, Any]) -> str | None:
    """Return the sentence that models with these values do not support `feature`; None if they do."""
    reasons, verb = unsupported(feature, values), "do" if feature.endswith("s") else "does"
    if not reasons:
        return None
    return f"{values.get('model_type')} models have {' and '.join(reasons)}, which {feature} {verb} not support"


def alternative(values: Mapping[str, Any]) -> str:
    """Return the advice to choose another model family, with its name if one is known."""
    instead = INSTEAD.get(str(values.get("model_type")))
    return f"choose another model family, such as {instead}" if instead else "choose another model family"


def rope_limit(values: Mapping[str, Any]) -> RopeLimit | None:
    """Return the limit of rows for models whose rotary frequencies depend on the longest row of a call."""
    ropes = values.get("rope_parameters") or values.get("rope_scaling")
    if not is_mapping(ropes):
        return None
    for rope in (ropes, *ropes.values()):  # some models have one rotary embedding per kind of layer
        rope_type = str(rope.get("rope_type", rope.get("type"))) if is_mapping(rope) else ""
        if key := ROPE_BY_MAX_POSITION.get(rope_type):
            limits = (rope.get(key), values.get(key), values.get("max_position_embeddings"))
            return next((RopeLimit(rope_type, limit, key) for limit in limits if isinstance(limit, int)), None)
    return None


def _against_packed_rows(values: Mapping[str, Any]) -> Iterator[str]:
    model_type = values.get("model_type")
    if model_type in SPARSE:
        yield "sparse attention over selected tokens"
    types = values.get("layer_types")
    supported_types = {"full_attention", "sliding_attention"}
    supported_types |= {"linear_attention"} if model_type in RESETS_STATE else set()
    other_types = sorted(set(types) - supported_types) if is_list(types) else []
    if other_types:
        yield f"layers with neither full nor sliding-window attention (layer_types contains {', '.join(other_types)})"
    if values.get("attn_temperature_tuning") and 0 in (values.get("no_rope_layers") or ()):
        # transformers counts positions from the start of a call, so those of packed rows and of decoding are wrong.
        yield f"scaled queries (attn_temperature_tuning={values['attn_temperature_tuning']})"
    if model_type in DROPS_ARGUMENTS:
        yield "layers that do not pass the arguments of packed calls to their attention"
    if "keep_window_size" in values:
        yield f"a mask that depends on the values (keep_window_size={values['keep_window_size']})"
    if (
        model_type in NOT_CAUSAL
        or values.get("is_causal") is False
        or values.get("use_bidirectional_attention") in (True, "all")
    ):
        yield "attention that is not causal"
    if model_type in RECURRENT and model_type not in RESETS_STATE:
        yield STATE
    if model_type in OWN_ATTENTION:
        yield "attention code that does not use the attention interface of transformers"


def _against_training(values: Mapping[str, Any]) -> Iterator[str]:
    if not runs_padded(values):
        yield from _against_packed_rows(values)


def _against_fused_log_probs(values: Mapping[str, Any]) -> Iterator[str]:
    model_type = str(values.get("model_type"))
    known_keys = LOGIT_FACTORS.get(model_type, ("", 1))[0], LOGIT_SOFTCAPS.get(model_type)
    for key, value in values.items():
        if key not in known_keys and LOGIT_KEYS.search(key) and value not in (None, 1.0):
            yield f"logits that change after the output layer ({key}={value})"


def _against_prefix_sharing(values: Mapping[str, Any]) -> Iterator[str]:
    if runs_padded(values):
        yield "right-padded rows"
    dropout = [f"{key}={value}" for key, value in values.items() if "drop" in key and value]
    if dropout:
        yield f"dropout ({', '.join(dropout)})"
    if values.get("attn_logit_softcapping") is not None or values.get("model_type") in SINKS:
        return  # `models/blockwise.py` supports windows and all widths
    if values.get("sliding_window") is not None and values.get("use_sliding_window") is not False:
        yield f"a sliding window (sliding_window={values['sliding_window']})"
    head_dim = _head_dim(values)
    if values.get("v_head_dim") not in (None, head_dim):
        yield f"keys and values of different widths ({head_dim}, v_head_dim={values['v_head_dim']})"
    if values.get("model_type") in RESETS_STATE:
        yield STATE
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        yield f"heads of {head_dim} dimensions, more than {MAX_HEAD_DIM}"


def _head_dim(values: Mapping[str, Any]) -> int | None:
    """Return the width of the keys of one head; None if the values do not contain it."""
    if values.get("qk_nope_head_dim"):  # multi-head latent attention, whose `head_dim` may be that of the rotated part
        return values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    if values.get("head_dim"):
        return values["head_dim"]
    hidden = next((values[key] for key in ("hidden_size", "n_embd", "d_model") if values.get(key)), None)
    heads = next((values[key] for key in ("num_attention_heads", "n_head", "n_heads") if values.get(key)), None)
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None


def _against_sequence_parallelism(values: Mapping[str, Any]) -> Iterator[str]:
    if runs_padded(values):
        yield "right-padded rows"
    limit = rope_limit(values)
    if values.get("model_type") in RESETS_STATE:
        yield STATE
    if limit is not None:
        yield f"rotary frequencies that depend on the longest row of a call (rope_type={limit.rope_type})"


_REASONS: Mapping[Feature, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "packed rows": _against_packed_rows,
    "training": _against_training,
    "fused log-probs": _against_fused_log_probs,
    "prefix sharing": _against_prefix_sharing,
    "sequence parallelism": _against_sequence_parallelism,
}
