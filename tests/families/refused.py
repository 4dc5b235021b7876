"""Decoder-only types that camshaft refuses, with the part of the error that states the reason."""

NOT_CAUSAL = "attention that is not causal"
LOGITS = "logits that change after the output layer"
SOFT_CAPS = "soft-capped attention scores"
SINKS = "attention sinks"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("cpmant", "xlm", "xlnet"), NOT_CAUSAL),
    **dict.fromkeys(("gemma3n_text", "nanochat", "recurrent_gemma", "xlstm"), LOGITS),
    **dict.fromkeys(("gemma2", "vaultgemma"), SOFT_CAPS),
    **dict.fromkeys(("gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"), SINKS),
}
