"""Match and replace nodes of the operator graphs of `tracer.py`, for fusions of any device.

    for node in list(graph.nodes):
        match = match_rotation(node)
        if match is not None:
            replace(node, rotate, *match)

A match looks at operators and their arguments, not at model families. An operator may have been called as a function or
as a method.
"""

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node


def name_of(node: Node) -> str:
    return getattr(node.target, "__name__", "")


def is_call(node: Any, name: str) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and name_of(node) == name


def operand_orders(node: Any, name: str) -> list[tuple[Any, Any]]:
    """Return the operands of the commutative operator `name` in both orders, or an empty list for other nodes."""
    if not is_call(node, name) or len(node.args) != 2 or node.kwargs:
        return []
    left, right = node.args
    return [(left, right), (right, left)]


def without_cast(node: Any) -> Any:
    """Return the argument of a conversion to another dtype, or `node` itself."""
    return node.args[0] if is_call(node, "to") or is_call(node, "float") else node


def replace(node: Node, func: Callable[..., Any], *args: Any) -> Node:
    """Replace `node` with a call of `func`, and return the call."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(func, args)
    node.replace_all_uses_with(call)
    return call


def merge_equal_calls(graph: Graph) -> None:
    """Merge calls of the same operator with equal arguments. Those that write to the KV cache are kept."""
    nodes: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or name_of(node) in ("attend", "recur"):
            continue
        first = nodes.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def remove_unit_scale(node: Node) -> None:
    """Remove the multiplication of rotary sines and cosines by 1."""
    if not is_call(node, "mul") or node.args[1:] != (1.0,):
        return
    wave: Any = node.args[0]
    if is_call(wave, "cos") or is_call(wave, "sin"):
        node.replace_all_uses_with(wave)


def match_rms_scale(node: Any) -> tuple[Node, float] | None:
    """Return x and eps if `node` is x * rsqrt(mean(x^2) + eps)."""
    for x, scale in operand_orders(node, "mul"):
        for mean, eps in operand_orders(scale.args[0], "add") if is_call(scale, "rsqrt") else ():
            if not is_call(mean, "mean") or (*mean.args[1:], *mean.kwargs.values()) != (-1, True):
                continue
            if isinstance(eps, float) and is_call(mean.args[0], "pow") and mean.args[0].args == (x, 2):
                return x, eps
    return None


def match_rotation(node: Any) -> tuple[Node, Any, Any] | None:
    """Return x, cos and sin if `node` is x * cos + cat(-x[..., half:], x[..., :half]) * sin."""
    for cos_term, sin_term in operand_orders(node, "add"):
        for swapped, sin in operand_orders(sin_term, "mul"):
            x = _match_swapped_halves(swapped)
            if x is not None and is_call(cos_term, "mul") and x in cos_term.args:
                return x, cos_term.args[1 - cos_term.args.index(x)], sin
    return None


def _match_swapped_halves(node: Any) -> Node | None:
    """Return x if `node` is cat(-x[..., half:], x[..., :half])."""
    if not is_call(node, "cat") or (*node.args[1:], *node.kwargs.values()) != (-1,) or len(node.args[0]) != 2:
        return None
    minus, first = node.args[0]
    if not is_call(minus, "neg") or not is_call(minus.args[0], "__getitem__") or not is_call(first, "__getitem__"):
        return None
    second = minus.args[0]
    if first.args[0] is not second.args[0]:
        return None
    half = node.meta["shape"][-1] // 2
    slices = first.args[1], second.args[1]
    return first.args[0] if slices == ((..., slice(None, half)), (..., slice(half, None))) else None
