"""Fuse operators in the graphs of `tracer.py`.

    fuse(graph)

Fusions match operators and their arguments, not model families. Values that all layers share are computed once. The
root mean square of a norm and the rotation of queries and keys take half as many operators, in float32 and equal up to
rounding. Unmatched operators are unchanged.
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
    _once(graph)
    for node in list(graph.nodes):
        _remove_unit_scale(node)
        _root_mean_square(node)
        _rotation(node)
        _heads(node)
    _once(graph)  # what rotations need of the sines
    graph.eliminate_dead_code()


def _once(graph: Graph) -> None:
    """Merge equal calls with equal arguments; no traced operator writes in place or is random."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _name(node) == "attend":
            continue
        first = seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


# -- x * rsqrt(mean(x^2) + eps) -------------------------------------------------------------------


def scaled_by_rms(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_number(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _number(value: float) -> Tensor:
    """Return a scalar tensor: adding it takes half as long as adding a Python number."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32)


def _root_mean_square(node: Node) -> None:
    """Replace `node` by `scaled_by_rms` if it matches."""
    for x, scale in _operand_orders(node, "mul"):
        if not _is(scale, "rsqrt") or not _is(scale.args[0], "add"):
            continue
        mean, eps = scale.args[0].args
        if not _is(mean, "mean") or (*mean.args[1:], *mean.kwargs.values()) != (-1, True):
            continue
        if isinstance(eps, float) and _is(mean.args[0], "pow") and mean.args[0].args == (x, 2):
            _replace(node, scaled_by_rms, x, eps)
            return


# -- x * cos + cat(-x[half:], x[:half]) * sin -----------------------------------------------------


def signed_sin(sin: Tensor) -> Tensor:
    """Negate the first half of the last dimension."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotated(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def _rotation(node: Node) -> None:
    """Replace `node` by `rotated` if it matches."""
    for straight, across in _operand_orders(node, "add"):
        for turned, sin in _operand_orders(across, "mul"):
            x = _halves_swapped(turned)
            if x is None or not _is(straight, "mul") or x not in straight.args:
                continue
            cos = straight.args[1 - straight.args.index(x)]
            with node.graph.inserting_before(node):
                signed = node.graph.call_function(signed_sin, (sin,))
            _replace(node, rotated, x, cos, signed)
            return


def _halves_swapped(node: Any) -> Node | None:
    """Return x if `node` is cat(-x[..., half:], x[..., :half])."""
    if not _is(node, "cat") or (*node.args[1:], *node.kwargs.values()) != (-1,) or len(node.args[0]) != 2:
        return None
    minus, first = node.args[0]
    if not _is(minus, "neg") or not _is(minus.args[0], "__getitem__") or not _is(first, "__getitem__"):
        return None
    second = minus.args[0]
    if first.args[0] is not second.args[0]:
        return None
    half = node.meta["shape"][-1] // 2
    parts = first.args[1], second.args[1]
    return first.args[0] if parts == ((..., slice(None, half)), (..., slice(half, None))) else None


def _remove_unit_scale(node: Node) -> None:
    """Remove the multiplication by 1 of unscaled rotary sines and cosines."""
    wave: Any = node.args[0] if _is(node, "mul") else None
    if node.args[1:] == (1.0,) and (_is(wave, "cos") or _is(wave, "sin")):
        node.replace_all_uses_with(wave)


# -- one token per row ------------------------------------------------------------------------------


def _heads(node: Node) -> None:
    """Replace view(B, 1, heads, dim).transpose(1, 2) by one view."""
    viewed: Any = node.args[0] if _is(node, "transpose") else None
    if node.args[1:] != (1, 2) or not _is(viewed, "view"):
        return
    x, *sizes = viewed.args
    if len(sizes) == 1 and isinstance(sizes[0], tuple) and len(sizes[0]) == 4 and sizes[0][1] == 1:
        rows, _, heads, dim = sizes[0]
        _replace(node, torch.Tensor.view, x, (rows, heads, 1, dim))


# -- nodes ----------------------------------------------------------------------------------------


def _is(node: Any, name: str) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and _name(node) == name


def _name(node: Node) -> str:
    """Return the operator's name, called as a function or as a method."""
    return getattr(node.target, "__name__", "")


def _operand_orders(node: Any, name: str) -> list[tuple[Any, Any]]:
    """Return the operands of a commutative operator in both orders, or an empty list for any other node."""
    if not _is(node, name) or len(node.args) != 2 or node.kwargs:
        return []
    one, other = node.args
    return [(one, other), (other, one)]


def _replace(node: Node, func: Callable[..., Tensor], *args: Any) -> None:
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(node.graph.call_function(func, args))
