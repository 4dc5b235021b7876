"""Trace the decode step of a model into an operator graph, and verify a forward that was built from the graph.

    graph = trace_decode_step(hf, device)                       # inputs: tokens, positions, mask, slots, number of rows
    verified = verify(forward, eager, device, tolerance=1e-4)   # raises TraceError if the logits differ

The fast forwards of `cpu/` and `cuda/` use this module.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph
from transformers import PreTrainedModel

from camshaft.models.attention import Slots, no_mask
from camshaft.models.blockwise import Scores
from camshaft.models.recurrent import RecurrentLayer
from camshaft.rollout.builtin.tracer import TracedSlots, TraceError, trace

Forward = Callable[[Tensor, Tensor, Slots], Tensor]
"""Function of tokens (B,), positions (B,) and the slots of the KV cache that returns logits (B, V)."""

CHECKED_ROWS = (1, 2, 7)
"""Batch sizes for which a forward is compared with the model's own forward."""


def trace_decode_step(hf: PreTrainedModel, device: torch.device) -> Graph:
    """Trace the model's own forward on one token per row; raise `TraceError` if this is not possible."""

    def inputs(rows: int) -> dict[str, Any]:
        tokens, positions = _sample_inputs(rows, device)
        return {"tokens": tokens, "positions": positions, "mask": no_mask(device), "slots": _NoCache()}

    def run(tokens: Tensor, positions: Tensor, mask: Tensor, slots: Slots) -> Tensor:
        kwargs: dict[str, Any] = {"attention_mask": mask, "slots": TracedSlots(slots), "use_cache": False}
        return hf(input_ids=tokens[:, None], position_ids=positions[:, None], **kwargs).logits[:, -1]

    return trace(hf, inputs, run)


@torch.inference_mode()
def verify(forward: Forward, eager: Forward, device: torch.device, tolerance: float) -> bool:
    """Compare `forward` with `eager`, the model's own forward; raise `TraceError` if the logits differ.

    `tolerance` is relative to the largest absolute logit. Return False if the model's logits are not finite, because
    the comparison then shows nothing.
    """
    for rows in CHECKED_ROWS:
        inputs = _sample_inputs(rows, device)
        expected, logits = eager(*inputs, _NoCache()), forward(*inputs, _NoCache())
        if not expected.isfinite().all():
            return False
        if expected.shape != logits.shape:
            raise TraceError(f"traced logits have shape {tuple(logits.shape)}, not {tuple(expected.shape)}")
        difference, scale = float((expected - logits).abs().max()), float(expected.abs().max())
        if not difference <= tolerance * scale:
            raise TraceError(f"traced logits differ by {difference:.1e} from those of the model for {rows} rows")
    return True


class _NoCache:
    """Substitute for the KV cache, in which each token is the first of its row.

    Attention returns the value of the token, weighted by its query and key.

    The weight is not the product of query and key, because a rotary embedding rotates both by the same angle, so their
    product would not show an error of it. Attention sinks are added to the values of their heads.
    """

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores, sinks: Tensor | None
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        ramp = torch.linspace(-1, 1, query.shape[-1], dtype=query.dtype, device=query.device)
        difference = query - key.repeat_interleave(groups, 1)
        weight = (difference * ramp).sum(-1, keepdim=True).mul(scores.scale).sigmoid()
        values = value.repeat_interleave(groups, 1)
        values = values if sinks is None else values + sinks.to(value.dtype)[:, None, None]
        return (weight * values).transpose(1, 2)

    def recur(self, layer: RecurrentLayer, hidden_states: Tensor) -> Tensor:
        return layer.advance(hidden_states, None, None)[0]


def _sample_inputs(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens (rows,) and positions (rows,), each without duplicates."""
    numbers = torch.arange(rows, device=device) + 1
    return numbers, numbers.flip(0)
