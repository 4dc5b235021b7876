"""A model's forward on one token per row with fused operators, for decode steps on a GPU.

    fused = FusedForward(model, eager)
    forward = fused.bind()                          # the model's own forward if it cannot be traced
    logits = forward(tokens, positions, step)       # (B, V); `step` is a `TritonDecodeStep`

At the batch sizes of a decode step, the small operators between the matrix products take as long as the products. The
first call of `bind` traces the forward and fuses operators, which it finds by their arguments, not by the model family:

- Linear layers with the same input become one product. `SharedModel.join` keeps their weights in one tensor.
- An RMS norm, and the addition of the residual before it, become one kernel.
- The rotary embedding becomes part of the kernel that stores the key and value.
- silu(gate) * up becomes one kernel.

The kernels round intermediate results to the same dtypes as the operators that they replace. If an error occurs, or if
the logits differ from those of the model's own forward, `reason` contains the reason, and `bind` returns the model's
own forward.
"""

import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

from camshaft.models.attention import Slots, no_mask
from camshaft.models.blockwise import Scores
from camshaft.rollout.builtin.cuda.fused_kernels import add_rms_norm, rms_norm, silu_mul
from camshaft.rollout.builtin.cuda.kernels import TritonDecodeStep
from camshaft.rollout.builtin.decode_trace import Forward, trace_decode_step, verify
from camshaft.rollout.builtin.graph_nodes import (
    is_call,
    match_rms_scale,
    match_rotation,
    merge_equal_calls,
    operand_orders,
    remove_unit_scale,
    replace,
    without_cast,
)
from camshaft.rollout.builtin.tracer import TraceError, compile_graph, named_members
from camshaft.rollout.shared_model import SharedModel

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Maximum difference of logits, relative to the largest absolute logit, for each supported dtype of the weights."""

SEPARATOR = "+"
"""Separates the names of joined weights in the target of a node."""

Function = Callable[..., Tensor]

logger = logging.getLogger(__name__)


class FusedForward:
    """The fused forward of one model on one token per row."""

    def __init__(self, model: SharedModel, eager: Forward):
        """`eager` is the model's own forward."""
        self.model, self.eager = model, eager
        self.reason: str | None = None
        """Why `bind` returns the model's own forward, or None."""
        self._compiled: tuple[Function, dict[str, str]] | None = None  # the results of `compile_graph`

    def bind(self) -> Forward:
        """Return a forward that uses the current weights."""
        if self._compiled is None and self.reason is None:
            try:
                self._compiled = self._trace()
            except Exception as error:  # a model that cannot be fused generates with its own forward
                self.reason = str(error) if isinstance(error, TraceError) else f"{type(error).__name__}: {error}"
                logger.info("decode steps of %s are not fused: %s", type(self.model.hf).__name__, self.reason)
        return self.eager if self._compiled is None else self._bind(*self._compiled)

    def _trace(self) -> tuple[Function, dict[str, str]] | None:
        """Trace the forward, fuse operators, and compare the result with the model.

        Return None if the model's logits are not finite. Other weights may then be tried.
        """
        model = self.model
        dtypes = {parameter.dtype for parameter in model.hf.parameters()}
        if len(dtypes) != 1 or not dtypes <= TOLERANCES.keys():
            raise TraceError(f"weights of the dtypes {', '.join(sorted(map(str, dtypes)))} are not supported")
        graph = trace_decode_step(model.hf, model.device)
        fuse(graph, named_members(model.hf))
        function, names = compile_graph(graph)
        model.join([name.split(SEPARATOR) for name in names.values() if SEPARATOR in name])
        forward = self._bind(function, names)
        return (function, names) if verify(forward, self.eager, model.device, TOLERANCES[dtypes.pop()]) else None

    def _bind(self, function: Function, names: dict[str, str]) -> Forward:
        members = named_members(self.model.hf)
        values = {
            attribute: self.model.joined(name.split(SEPARATOR)) if SEPARATOR in name else members[name]
            for attribute, name in names.items()
        }
        namespace, mask = SimpleNamespace(**values), no_mask(self.model.device)
        return lambda tokens, positions, slots: function(namespace, tokens, positions, mask, slots, len(tokens))


# -- fusions --------------------------------------------------------------------------------------


def fuse(graph: Graph, members: dict[str, Any]) -> None:
    """Fuse operators of `graph` in place. `members` contains the weights by name."""
    merge_equal_calls(graph)
    for node in list(graph.nodes):
        remove_unit_scale(node)
    _join_linears(graph, members)
    for node in list(graph.nodes):
        _fuse_norm(node)
        _fuse_rotation(node)
        _fuse_silu(node)
    graph.eliminate_dead_code()


def _join_linears(graph: Graph, members: dict[str, Any]) -> None:
    """Compute linear layers with the same input in one product, and slice its result."""
    by_input: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if is_call(node, "linear") and not node.kwargs and all(map(_is_weight, node.args[1:])):
            by_input[node.args[0]].append(node)
    joined: set[Node] = set()  # a weight can be adjacent to the weights of one group only
    for x, nodes in by_input.items():
        weights: list[Any] = [node.args[1] for node in nodes]
        biases: list[Any] = [node.args[2] if len(node.args) > 2 else None for node in nodes]
        parts = [part for part in (*weights, *biases) if part is not None]
        is_mixed = len({bias is None for bias in biases}) > 1
        if len(nodes) < 2 or is_mixed or len(set(parts)) < len(parts) or joined.intersection(parts):
            continue
        joined.update(parts)
        with graph.inserting_before(nodes[0]):
            product = graph.call_function(F.linear, (x, _join(graph, weights), _join(graph, biases)))
        start = 0
        for node, weight in zip(nodes, weights, strict=True):
            size = len(members[weight.target])
            replace(node, torch.narrow, product, -1, start, size).meta["shape"] = node.meta["shape"]
            start += size


def _join(graph: Graph, weights: Sequence[Any]) -> Node | None:
    """Return the node of joined weights, or None for layers without a bias."""
    if weights[0] is None:
        return None
    return graph.create_node("get_attr", SEPARATOR.join(weight.target for weight in weights))


def _is_weight(node: Any) -> bool:
    return node is None or (isinstance(node, Node) and node.op == "get_attr")


def _fuse_norm(node: Node) -> None:
    """Replace weight * norm(x) with `rms_norm`, and x = y + z before it with `add_rms_norm`."""
    for weight, normed in operand_orders(node, "mul"):
        match = match_rms_scale(without_cast(normed))
        if match is None or not _is_weight(weight) or weight is None:
            continue
        x, eps = without_cast(match[0]), match[1]
        terms = x.args if is_call(x, "add") and not x.kwargs else ()
        if len(terms) != 2 or not all(isinstance(term, Node) and _shape(term) == _shape(x) for term in terms):
            replace(node, rms_norm, x, weight, eps)
            return
        graph = node.graph
        with graph.inserting_before(x):
            both = graph.call_function(add_rms_norm, (*terms, graph.create_node("get_attr", weight.target), eps))
            total, result = (graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
            total.meta["shape"] = result.meta["shape"] = _shape(x)
        x.replace_all_uses_with(total)
        node.replace_all_uses_with(result)
        return


def _shape(node: Node) -> Any:
    return node.meta.get("shape")


def _fuse_rotation(node: Node) -> None:
    """Let the attention rotate query and key."""
    if not is_call(node, "attend") or node.kwargs:
        return
    slots, module, query, key, value, *options = node.args
    query_match, key_match = match_rotation(query), match_rotation(key)
    if query_match is not None and key_match is not None and query_match[1:] == key_match[1:]:
        replace(node, attend_rotated, slots, module, query_match[0], key_match[0], value, query_match[1:], *options)


def attend_rotated(
    slots: Slots,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: tuple[Tensor, Tensor],
    scores: Scores,
    sinks: Tensor | None,
) -> Tensor:
    """Rotate query and key, and call `attend`. `TritonDecodeStep` does both in its kernels."""
    if isinstance(slots, TritonDecodeStep):
        return slots.attend(module, query, key, value, scores, sinks, rotation)
    cos, sin = rotation
    query, key = (x * cos + _swap_halves(x) * sin for x in (query, key))
    return slots.attend(module, query, key, value, scores, sinks)


def _swap_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _fuse_silu(node: Node) -> None:
    """Replace silu(gate) * up with one kernel."""
    for activated, up in operand_orders(node, "mul"):
        if is_call(activated, "silu") and isinstance(up, Node) and _shape(up) == _shape(node):
            replace(node, silu_mul, activated.args[0], up)
            return
