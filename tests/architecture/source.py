"""The package as syntax trees. Nothing of it is imported."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "camshaft"

Modules = dict[str, ast.Module]
"""Syntax trees by the dotted name of their module."""


@functools.cache
def package() -> Modules:
    """Return the modules of the package."""
    modules = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return modules


def parse(**sources: str) -> Modules:
    """Return modules of the package that consist of these sources. `__` in a name stands for a dot."""
    return {f"{PACKAGE}.{name.replace('__', '.')}": ast.parse(source) for name, source in sources.items()}


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree without the imports for type checkers, `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.orelse:
                yield from runtime_nodes(statement)
        else:
            yield from runtime_nodes(child)


def docstrings(tree: ast.AST) -> set[ast.Constant]:
    """Return the docstrings of a tree, also those of attributes."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
