"""Context of a step: what a caller requests of `forward_backward_step`, and what the step returns beside predictions.

ctx = StepContext(outputs=("log_probs", "entropy"), temperature=0.7)
predictions, loss, ctx = engine.forward_backward_step(batch, ctx)
ctx["metrics"]
"""

import itertools
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from torch import Tensor

from camshaft.config.engine import EngineCapabilities, Head
from camshaft.errors import EngineError
from camshaft.models.heads import Output, default_output, supported_outputs

RoutingMode = Literal["compare", "replay"]

COUNTS = frozenset({"num_tokens", "num_sequences"})
"""Keys of the context that hold the counts of the mini-batch."""


class StepContext(TypedDict, total=False):
    """Control keys and results of one `forward_backward_step`.

    Hooks and callers may add keys. The engine returns these keys unchanged and accepts them in the next call.
    """

    outputs: tuple[Output, ...]
    """Predictions to compute; defaults to the first output of the head."""
    temperature: float
    """The engine divides the logits by it before it computes log-probs and entropy; defaults to 1.0."""
    routing: RoutingMode
    """Use of the batch's column `routed_experts` by a mixture-of-experts model. "replay" computes each token with these
    experts. Both values add the prediction `routing_mismatch`: for each token, the fraction of the routers' choices at
    the previous token that the column does not contain. Without this key, the column is not read."""
    num_tokens: float
    """Number of `loss_mask` tokens in the mini-batch, summed over all data-parallel ranks. Set by the engine."""
    num_sequences: float
    """Number of rows with at least one `loss_mask` token, summed over all data-parallel ranks. If the batch has the
    column `sequence_weight`, (B,), it is the sum of the weights of these rows. Set by the engine."""
    loss_is_sum: bool
    """True if the loss is a sum over tokens on purpose, so that it needs no count. Set by the loss."""
    metrics: dict[str, Tensor]
    """Metrics of one micro-batch, divided by the counts of the mini-batch. Set by the loss; the engine sums them."""


class CallContext(dict[str, Any]):
    """Context of one `forward_backward_step` that records if the loss reads a count."""

    counts_read = False

    def __getitem__(self, key: str) -> Any:
        self.counts_read |= key in COUNTS
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.counts_read |= key in COUNTS
        return super().get(key, default)


def call_context(ctx: Mapping[str, Any] | None, head: Head, capabilities: EngineCapabilities) -> CallContext:
    """Check the control keys of `ctx` and return a copy with defaults filled in and empty metrics."""
    values = CallContext(ctx or {})
    control = StepContext.__annotations__
    custom_keys: set[Any] = values.keys() - control.keys()
    for key in custom_keys:
        nearest = next((name for name in control if isinstance(key, str) and _is_misspelled(key, name)), None)
        if nearest is not None:
            raise EngineError(
                f"ctx['{key}'] is not a control key; did you mean '{nearest}'? If '{key}' is a custom key, choose a "
                f"name that differs in more than one letter. Control keys: {', '.join(control)}"
            )
    supported = supported_outputs(head, capabilities)
    outputs = tuple(values.get("outputs", (default_output(head),)))
    unsupported = [name for name in outputs if name not in supported]
    if unsupported:
        raise EngineError(
            f"ctx['outputs'] contains {', '.join(unsupported)}, but this engine with head={head} supports only "
            f"{', '.join(supported)}"
        )
    temperature = float(values.get("temperature", 1.0))
    if temperature <= 0:
        raise EngineError(f"ctx['temperature']={temperature} is not above 0; use 1.0 for unscaled logits")
    values.update(outputs=outputs, temperature=temperature, loss_is_sum=False, metrics={})
    return values


def _is_misspelled(key: str, name: str) -> bool:
    """Return True if one letter of `name` is missing, added or replaced in `key`, or two neighbors are swapped."""
    equal = itertools.takewhile(lambda letters: letters[0] == letters[1], zip(key, name, strict=False))
    start = len(list(equal))
    rest, expected = key[start:], name[start:]
    return expected in (expected[:1] + rest[1:], rest[1:], rest[1::-1] + rest[2:]) or rest == expected[1:]
