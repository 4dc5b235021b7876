"""Fuse operators in the operator graphs of `tracer.py`.

    fuse(graph)

Fusions match operators and their arguments, not model families. Values that all layers share are computed once. RMS
norms and rotary embeddings need half as many operators. The results are in float32 and equal up to rounding. Operators
that match no fusion are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node


def fuse(graph: Graph) -> None:
    """Fuse operators of `graph` in place."""
    _merge_equal_calls(graph)
    for node in list(graph.nodes):
        _remove_unit_scale(node)
        _fuse_rms(node)
        _fuse_rotation(node)
        _fuse_head_view(node)
    _merge_equal_calls(graph)  # rotations have added one equal call per layer
    graph.eliminate_dead_code()


def _merge_equal_calls(graph: Graph) -> None:
    """Merge calls of the same operator with equal arguments. No traced operator writes in place or is random."""
    nodes: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _name(node) == "attend":
            continue
        first = nodes.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


# -- x * rsqrt(mean(x^2) + eps) -------------------------------------------------------------------


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
    """Replace `node` with a call of `scale_by_rms` if it matches."""
    for x, scale in _operand_orders(node, "mul"):
        if not _is_call(scale, "rsqrt") or not _is_call(scale.args[0], "add"):
            continue
        mean, eps = scale.args[0].args
        if not _is_call(mean, "mean") or (*mean.args[1:], *mean.kwargs.values()) != (-1, True):
            continue
        if isinstance(eps, float) and _is_call(mean.args[0], "pow") and mean.args[0].args == (x, 2):
            _replace(node, scale_by_rms, x, eps)
            return


# -- x * cos + cat(-x[half:], x[:half]) * sin -----------------------------------------------------


def negate_first_half(sin: Tensor) -> Tensor:
    """Return `sin` with the first half of the last dimension negated."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Apply a rotary embedding; `signed_sin` is the result of `negate_first_half`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def _fuse_rotation(node: Node) -> None:
    """Replace `node` with a call of `rotate` if it matches."""
    for cos_term, sin_term in _operand_orders(node, "add"):
        for swapped, sin in _operand_orders(sin_term, "mul"):
            x = _match_swapped_halves(swapped)
            if x is None or not _is_call(cos_term, "mul") or x not in cos_term.args:
                continue
            cos = cos_term.args[1 - cos_term.args.index(x)]
            with node.graph.inserting_before(node):
                signed_sin = node.graph.call_function(negate_first_half, (sin,))
            _replace(node, rotate, x, cos, signed_sin)
            return


def _match_swapped_halves(node: Any) -> Node | None:
    """Return x if `node` is cat(-x[..., half:], x[..., :half])."""
    if not _is_call(node, "cat") or (*node.args[1:], *node.kwargs.values()) != (-1,) or len(node.args[0]) != 2:
        return None
    minus, first = node.args[0]
    if not _is_call(minus, "neg") or not _is_call(minus.args[0], "__getitem__") or not _is_call(first, "__getitem__"):
        return None
    second = minus.args[0]
    if first.args[0] is not second.args[0]:
        return None
    half = node.meta["shape"][-1] // 2
    slices = first.args[1], second.args[1]
    return first.args[0] if slices == ((..., slice(None, half)), (..., slice(half, None))) else None


def _remove_unit_scale(node: Node) -> None:
    """Remove the multiplication of rotary sines and cosines by 1."""
    wave: Any = node.args[0] if _is_call(node, "mul") else None
    if node.args[1:] == (1.0,) and (_is_call(wave, "cos") or _is_call(wave, "sin")):
        node.replace_all_uses_with(wave)


# -- one token per row ------------------------------------------------------------------------------


def _fuse_head_view(node: Node) -> None:
    """Replace view(B, 1, heads, dim).transpose(1, 2) with one view."""
    viewed: Any = node.args[0] if _is_call(node, "transpose") else None
    if node.args[1:] != (1, 2) or not _is_call(viewed, "view"):
        return
    x, *sizes = viewed.args
    if len(sizes) == 1 and isinstance(sizes[0], tuple) and len(sizes[0]) == 4 and sizes[0][1] == 1:
        rows, _, heads, dim = sizes[0]
        _replace(node, torch.Tensor.view, x, (rows, heads, 1, dim))


# -- nodes ----------------------------------------------------------------------------------------


def _is_call(node: Any, name: str) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and _name(node) == name


def _name(node: Node) -> str:
    """Return the name of the operator, whether it was called as a function or as a method."""
    return getattr(node.target, "__name__", "")


def _operand_orders(node: Any, name: str) -> list[tuple[Any, Any]]:
    """Return the operands of the commutative operator `name` in both orders, or an empty list for other nodes."""
    if not _is_call(node, name) or len(node.args) != 2 or node.kwargs:
        return []
    left, right = node.args
    return [(left, right), (right, left)]


def _replace(node: Node, func: Callable[..., Tensor], *args: Any) -> None:
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(node.graph.call_function(func, args))
