"""Training loops and copied statements.

A training loop is a loop that logs and saves. Statements are copied if they are equal up to names and constants.
"""

import ast
import copy
from collections import defaultdict
from collections.abc import Iterator

from architecture.source import Modules

RUN = 6
"""Number of statements from which a run of equal statements is a copy."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def training_loops(modules: Modules) -> list[str]:
    """Return the functions that contain a training loop."""
    return sorted(
        f"{module.partition('.')[2]}.{function.name}"
        for module, tree in modules.items()
        for function in _functions(tree)
        if any(_logs_and_saves(node) for node in ast.walk(function) if isinstance(node, ast.For | ast.While))
    )


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _logs_and_saves(loop: ast.AST) -> bool:
    calls = {
        node.func.attr for node in ast.walk(loop) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    return {"log", "save"} <= calls


def copies(modules: Modules) -> list[list[str]]:
    """Return groups of places with `RUN` equal statements. Statements that resemble their neighbors are one place."""
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for module, tree in modules.items():
        for block in _blocks(tree):
            shapes = [_shape(statement) for statement in block]
            last: dict[tuple[str, ...], int] = {}
            for start in range(len(block) - RUN + 1):
                run = tuple(shapes[start : start + RUN])
                if start - last.get(run, -RUN) >= RUN:
                    places[run].append(f"{module.partition('.')[2]}:{block[start].lineno}")
                last[run] = start
    return [group for group in places.values() if len(group) > 1]


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield the lists of at least `RUN` statements inside of functions."""
    nodes = {id(node): node for function in _functions(tree) for node in ast.walk(function)}
    for node in nodes.values():
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and len(block) >= RUN:
                yield block


class _Blank(ast.NodeTransformer):
    """Replaces names and constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("x", node.ctx)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(0)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg("x")


def _shape(statement: ast.stmt) -> str:
    return ast.dump(_Blank().visit(copy.deepcopy(statement)))
