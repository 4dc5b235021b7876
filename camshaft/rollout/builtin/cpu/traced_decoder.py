"""Run decode steps with a traced operator graph of the model's forward, or with the model's own forward.

    decoder = Decoder(hf)
    with decoder.prepare(num_rows=64, num_steps=128) as forward:
        logits = forward(tokens, positions, DecodeStep(cache, positions, classes))    # (B, V)

A small model spends half of a decode step in Python code and in many small operators. For a float32 model on a CPU, the
first generation that is long enough traces the forward (`tracer.py`), fuses operators (`graph_fusions.py`), and
compares the result with the model's own forward on other tokens and batch sizes. If tracing fails or the logits differ,
generation uses the model's own forward and `decoder.reason` contains the reason. Models with hooks also use their own
forward. The graph contains no weights; each generation binds the model's current weights. Packed copies of the weights
are freed after it, unless the next turns of its rows use them.
"""

import bisect
import logging
from collections.abc import Iterator
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
    Copies,
    PackableLinear,
    packed_linears,
    select_product,
)
from camshaft.rollout.builtin.cpu.threads import limited_threads
from camshaft.rollout.builtin.decode_trace import Forward, trace_decode_step, verify
from camshaft.rollout.builtin.tracer import TraceError, compile_graph, named_members

CPU = torch.device("cpu")

TOLERANCE = 1e-4
"""Maximum difference of logits, relative to the largest absolute logit."""

logger = logging.getLogger(__name__)


class Decoder:
    """Decode steps of one model."""

    def __init__(self, hf: PreTrainedModel):
        self.hf = hf
        self.reason: str | None = None
        self._traced: _TracedForward | None = None
        self.copies: Copies = {}  # for later turns

    @contextmanager
    def prepare(self, num_rows: int, num_steps: int, keep: bool = False) -> Iterator[Forward]:
        """Yield a forward that uses the current weights. Their packed copies are freed on exit or stay in `copies`."""
        use_trace = num_rows >= MIN_ROWS and num_steps >= MIN_STEPS and not has_hooks(self.hf)
        if use_trace:
            self._trace_once()
        with packed_linears(self.hf, num_rows, num_steps, copies=self.copies if keep else None):
            forward = self._traced.bind(self.hf) if use_trace and self._traced is not None else self.eager
            with limited_threads(forward, self.hf) as limited:
                yield limited

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
            graph = trace_decode_step(self.hf, CPU)
            fuse(graph)
            traced = _TracedForward(graph, self.hf)
            if verify(traced.bind(self.hf), self.eager, CPU, TOLERANCE):
                self._traced = traced
        except TraceError as error:
            self.reason = str(error)
            logger.info("%s generates with its own forward, which cannot be traced: %s", type(self.hf).__name__, error)


def has_hooks(hf: nn.Module) -> bool:
    """Return True if any module has forward hooks, which a traced forward would skip."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in hf.modules())


class _TracedForward:
    """An operator graph compiled to a Python function. `bind` looks up the weights."""

    def __init__(self, graph: Graph, hf: nn.Module):
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
        self.function, self.members = compile_graph(graph)

    def bind(self, hf: nn.Module) -> Forward:
        """Return a forward that uses the current weights of `hf` and their packed copies."""
        members, mask = named_members(hf), no_mask("cpu")
        weights = {attribute: members[name] for attribute, name in self.members.items()}
        layers: dict[str, Any] = {attribute: hf.get_submodule(name) for attribute, name in self.linears.items()}
        namespaces = [
            SimpleNamespace(**weights, **{name: select_product(layer, rows) for name, layer in layers.items()})
            for rows in ROW_THRESHOLDS
        ]

        def forward(tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
            rows = len(tokens)
            namespace = namespaces[bisect.bisect_right(ROW_THRESHOLDS, rows) - 1]
            return self.function(namespace, tokens, positions, mask, slots, rows)

        return forward
