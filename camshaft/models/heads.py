"""Outputs of a model, by its head.

tuple(OUTPUTS["causal_lm"])         # "log_probs", "target_log_probs", "entropy", "sum_pi_squared", ...
DIMENSIONS["distribution"]          # "token", "vocabulary"
"""

from collections.abc import Mapping
from typing import Literal

from camshaft.config.engine import EngineCapabilities, Head

Output = Literal[
    "log_probs", "target_log_probs", "entropy", "sum_pi_squared", "distribution", "full_kl", "values", "scores"
]
Dimension = Literal["row", "token", "vocabulary"]

OUTPUTS: dict[Head, dict[Output, tuple[Dimension, ...]]] = {
    "causal_lm": {
        "log_probs": ("token",),
        "target_log_probs": ("token",),
        "entropy": ("token",),
        "sum_pi_squared": ("token",),
        "distribution": ("token", "vocabulary"),
        "full_kl": ("token",),
    },
    "value": {"values": ("token",)},
    "reward": {"scores": ("row",)},
}
"""Outputs that each head supports, with their dimensions; the first is the default.

`target_log_probs` are the log-probs of the batch's column `targets` in place of the tokens of `input_ids`. Entry j is
that of target j given the tokens before j.
`sum_pi_squared` is sum_v p(v)^2, without gradient. `distribution` holds the log-probs of the whole vocabulary for each
token, without gradient. `full_kl` is KL(p || q) =
sum_v p(v) (log p(v) - log q(v)) of the model's distribution p. The batch's column `log_q` holds log q, the
`distribution` of another model; a `preprocess_fn` may add it. The gradient flows through p only.
"""

DIMENSIONS: Mapping[str, tuple[Dimension, ...]] = {
    name: dimensions for outputs in OUTPUTS.values() for name, dimensions in outputs.items()
}
"""Dimensions of every output."""


def supported_outputs(head: Head, capabilities: EngineCapabilities) -> tuple[Output, ...]:
    """Return the outputs of a head that an engine with these capabilities computes."""
    return tuple(n for n in OUTPUTS[head] if n != "target_log_probs" or capabilities.supports_target_log_probs)


def default_output(head: Head) -> Output:
    """Return the output that a head computes if none is requested."""
    return next(iter(OUTPUTS[head]))
