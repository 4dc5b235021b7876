"""Decoder-only types that camshaft refuses, with the part of the error that states the reason."""

STATE = "a recurrent state"
LAYERS = "layers with neither full nor sliding-window attention"
INTERFACE = "not use the attention interface of transformers"
LOGITS = "logits that change after the output layer"
SOFT_CAPS = "soft-capped attention scores"
SINKS = "attention sinks"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "nemotron_h", "rwkv"), STATE),
    **dict.fromkeys(("recurrent_gemma", "xlstm", "zamba", "zamba2"), STATE),
    **dict.fromkeys(("axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "granitemoehybrid", "inkling_text"), LAYERS),
    **dict.fromkeys(("kimi_linear", "lfm2", "lfm2_moe", "llama4_text", "minimax", "olmo_hybrid", "zaya"), LAYERS),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text"), LAYERS),
    **dict.fromkeys(("biogpt", "bloom", "codegen", "cpmant", "falcon", "gpt_neo", "gpt_neox_japanese"), INTERFACE),
    **dict.fromkeys(("gptj", "mpt", "openai-gpt", "stablelm", "xglm", "xlm", "xlnet"), INTERFACE),
    **dict.fromkeys(("gemma3n_text", "nanochat"), LOGITS),
    **dict.fromkeys(("gemma2", "vaultgemma"), SOFT_CAPS),
    **dict.fromkeys(("gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"), SINKS),
    "doge": "a mask that depends on the values",
    "modernbert-decoder": "layers between the decoder and the output layer",
    "nemotron": "layers that do not pass the arguments of packed calls",
}
