"""Decoder-only types that camshaft refuses, with the part of the error that states the reason."""

NOT_CAUSAL = "attention that is not causal"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("cpmant", "xlm", "xlnet"), NOT_CAUSAL),
}
