"""Fuse operators in the operator graphs of `tracer.py`, for decode steps on a CPU.

    fuse(graph)

Values that all layers share are computed once. RMS norms and rotary embeddings need half as many operators. The results
are in float32 and equal up to rounding. Operators that match no fusion (`graph_nodes.py`) are unchanged.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from camshaft.rollout.builtin.graph_nodes import (
    is_call,
    match_rms_scale,
    match_rotation,
    merge_equal_calls,
    remove_unit_scale,
    replace,
)


def fuse(graph: Graph) -> None:
    """Fuse operators of `graph` in place."""
    merge_equal_calls(graph)
    for node in list(graph.nodes):
        remove_unit_scale(node)
        _fuse_rms(node)
        _fuse_rotation(node)
        _fuse_head_view(node)
    merge_equal_calls(graph)  # rotations have added one equal call per layer
    graph.eliminate_dead_code()


def scale_by_rms(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _scalar(value: float) -> Tensor:
    """Return a scalar tensor, because adding a tensor takes half as long as adding a Python number."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32)


def _fuse_rms(node: Node) -> None:
    match = match_rms_scale(node)
    if match is not None:
        replace(node, scale_by_rms, *match)


def negate_first_half(sin: Tensor) -> Tensor:
    """Return `sin` with the first half of the last dimension negated."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Apply a rotary embedding; `signed_sin` is the result of `negate_first_half`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def _fuse_rotation(node: Node) -> None:
    match = match_rotation(node)
    if match is not None:
        x, cos, sin = match
        with node.graph.inserting_before(node):
            signed_sin = node.graph.call_function(negate_first_half, (sin,))
        replace(node, rotate, x, cos, signed_sin)


def _fuse_head_view(node: Node) -> None:
    """Replace view(B, 1, heads, dim).transpose(1, 2) with one view."""
    viewed: Any = node.args[0] if is_call(node, "transpose") else None
    if node.args[1:] != (1, 2) or not is_call(viewed, "view"):
        return
    x, *sizes = viewed.args
    if len(sizes) == 1 and isinstance(sizes[0], tuple) and len(sizes[0]) == 4 and sizes[0][1] == 1:
        rows, _, heads, dim = sizes[0]
        replace(node, torch.Tensor.view, x, (rows, heads, 1, dim))
