"""Decode steps: the model's forward as a traced operator graph, or the model's own forward.

    decoder = Decoder(hf)
    with decoder.prepare(num_rows=64, num_steps=128) as forward:
        logits = forward(tokens, positions, DecodeStep(cache, positions, length))     # (B, V)

Half of a small model's decode step is the Python of its modules and many small operators. On a CPU in float32 the first
call that is long enough traces the forward (`tracer.py`), fuses operators (`graph_fusions.py`), and compares the result
with the model's own forward on other tokens and numbers of rows. If tracing fails or the logits differ, the model's own
forward runs and `decoder.reason` gives the reason. Models with hooks run their own forward too. The graph contains no
weights: each call binds the model's present ones.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node
from transformers import PreTrainedModel

from camshaft.models.attention import Slots, no_mask
from camshaft.rollout.builtin.cpu.graph_fusions import fuse
from camshaft.rollout.builtin.cpu.linears import (
    MIN_ROWS,
    MIN_STEPS,
    ROW_THRESHOLDS,
    PackableLinear,
    packed_linears,
    product_of,
)
from camshaft.rollout.builtin.cpu.tracer import TracedSlots, TraceError, named_members, trace

Forward = Callable[[Tensor, Tensor, Slots], Tensor]
"""A function of (B,) tokens, (B,) positions and the KV cache; returns (B, V) logits."""

CHECKED_ROWS = (1, 2, 7)
"""Numbers of rows on which the traced forward is compared with the model's own."""

TOLERANCE = 1e-4
"""Maximum difference of logits, relative to the largest logit."""


logger = logging.getLogger(__name__)


class Decoder:
    """Run decode steps of one model."""

    def __init__(self, hf: PreTrainedModel):
        self.hf = hf
        self.reason: str | None = None
        self._traced: _TracedForward | None = None

    @contextmanager
    def prepare(self, num_rows: int, num_steps: int) -> Iterator[Forward]:
        """Yield a forward with the present weights; packed copies are freed on exit."""
        use_trace = num_rows >= MIN_ROWS and num_steps >= MIN_STEPS and not has_hooks(self.hf)
        if use_trace:
            self._trace_once()
        with packed_linears(self.hf, num_rows, num_steps):
            yield self._traced.bound(self.hf) if use_trace and self._traced is not None else self.eager

    def eager(self, tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
        """Run the model's own forward."""
        kwargs: dict[str, Any] = {"attention_mask": no_mask(tokens.device), "slots": slots, "use_cache": False}
        return self.hf(input_ids=tokens[:, None], position_ids=positions[:, None], **kwargs).logits[:, -1]

    def _trace_once(self) -> None:
        if self._traced is not None or self.reason is not None:
            return
        if any(t.device.type != "cpu" or t.dtype != torch.float32 for t in self.hf.parameters()):
            self.reason = "traced decoding requires float32 on a CPU"
            return
        try:
            self._traced = self._trace_checked()
        except TraceError as error:
            self.reason = str(error)
            logger.info("%s generates with its own forward: %s", type(self.hf).__name__, error)

    def _trace_checked(self) -> _TracedForward | None:
        """Trace, fuse and compare with the model; None if its logits are not finite, which decides nothing."""
        names = ("tokens", "positions", "mask", "slots")

        def inputs(rows: int) -> dict[str, Any]:
            return dict(zip(names, (*_sample_inputs(rows), no_mask("cpu"), _NoCache()), strict=True))

        def run(tokens: Tensor, positions: Tensor, mask: Tensor, slots: Slots) -> Tensor:
            kwargs: dict[str, Any] = {"attention_mask": mask, "slots": TracedSlots(slots), "use_cache": False}
            return self.hf(input_ids=tokens[:, None], position_ids=positions[:, None], **kwargs).logits[:, -1]

        graph = trace(self.hf, inputs, run)
        fuse(graph)
        traced = _TracedForward(graph, self.hf)
        with torch.inference_mode():
            forward = traced.bound(self.hf)
            for rows in CHECKED_ROWS:
                expected, logits = (f(*_sample_inputs(rows), _NoCache()) for f in (self.eager, forward))
                if not expected.isfinite().all():
                    return None
                difference, largest = float((expected - logits).abs().max()), float(expected.abs().max())
                if expected.shape != logits.shape or not difference <= TOLERANCE * largest:
                    raise TraceError(
                        f"traced logits differ by {difference:.1e} from those of the model for {rows} rows"
                    )
        return traced


def has_hooks(hf: nn.Module) -> bool:
    """Return True if any module has forward hooks, which a traced forward would skip."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in hf.modules())


class _TracedForward:
    """An operator graph compiled to a Python function; weights are looked up when it is bound."""

    def __init__(self, graph: Graph, hf: nn.Module):
        self.members: dict[str, str] = {}
        self.linears: dict[str, str] = {}
        members = named_members(hf)
        layers = {
            (id(m.weight), id(m.bias)): name for name, m in hf.named_modules() if type(m) in (nn.Linear, PackableLinear)
        }
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is F.linear and not node.kwargs:
                weights = (
                    members.get(str(arg.target)) if isinstance(arg, Node) else arg for arg in (*node.args, None)[1:3]
                )
                layer = layers.get(tuple(map(id, weights)))  # pyright: ignore[reportArgumentType]
                if layer is not None:
                    node.op, node.target, node.args = "call_module", f"linear{len(self.linears)}", node.args[:1]
                    self.linears[node.target] = layer
        graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        for node in graph.nodes:
            if node.op == "get_attr":
                name, node.target = node.target, f"member{len(self.members)}"
                self.members[node.target] = name
        code = graph.python_code("self")
        scope = dict(code.globals)
        exec(code.src, scope)
        self.function: Any = scope["forward"]

    def bound(self, hf: nn.Module) -> Forward:
        """Bind the present weights of `hf` and their packed copies."""
        members, mask = named_members(hf), no_mask("cpu")
        common = {short: members[name] for short, name in self.members.items()}
        layers: dict[str, Any] = {short: hf.get_submodule(name) for short, name in self.linears.items()}
        namespaces = [
            SimpleNamespace(**common, **{short: product_of(layer, rows) for short, layer in layers.items()})
            for rows in ROW_THRESHOLDS
        ]

        def forward(tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
            rows = len(tokens)
            namespace = namespaces[bisect.bisect_right(ROW_THRESHOLDS, rows) - 1]
            return self.function(namespace, tokens, positions, mask, slots, rows)

        return forward


class _NoCache:
    """A stand-in for the KV cache: each token attends to itself with a weight from its query and key."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        share = (query * key.repeat_interleave(groups, 1)).sum(-1, keepdim=True).mul(scaling).sigmoid()
        return (share * value.repeat_interleave(groups, 1)).transpose(1, 2)


def _sample_inputs(rows: int) -> tuple[Tensor, Tensor]:
    """Return distinct tokens and positions."""
    return torch.arange(rows) + 1, torch.arange(rows).flip(0)
