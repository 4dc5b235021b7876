"""Changes of libraries and of objects that belong to others.

A change is an assignment to an attribute of an imported name, an assignment to a method of any object but `self`, an
entry of `sys.modules`, a call of `setattr` or `delattr` on any object but `self`, a call of `unittest.mock`, and a call
of `exec` or `eval`. The change and its restoration are one patch.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from architecture.source import Modules

METHODS = {
    *("forward", "backward", "__class__", "__call__", "__dict__", "__getattr__", "__getattribute__", "__setattr__"),
    *("__torch_function__", "__torch_dispatch__"),
}
"""Attributes that determine what an object does."""
LOOKUP = re.compile(r"\bsys\.modules\b|\bimport_module\(")
"""Expressions that return a module."""


def patches(modules: Modules) -> Counter[str]:
    """Return what each module changes, with the number of statements."""
    return Counter(
        f"{module.partition('.')[2]}: {change}"
        for module, tree in modules.items()
        for change in _changes(tree, _imported_names(tree))
    )


def _imported_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value and LOOKUP.search(ast.unparse(node.value)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _changes(tree: ast.Module, imported: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            owner = ast.unparse(node.value)
            if isinstance(node, ast.Subscript):
                is_patch = owner == "sys.modules" or owner.endswith(".__dict__")
            else:
                is_patch = _root(node) in imported or (node.attr in METHODS and owner not in ("self", "cls"))
            if is_patch:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            function, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
            is_set = function.removeprefix("object.__").removesuffix("__") in ("setattr", "delattr")
            is_mock = re.search(r"\bmock\.patch\b", function) is not None
            if is_mock or function in ("exec", "eval") or (is_set and first != "self"):
                yield f"{function}({first})"


def _root(node: ast.expr) -> str:
    """Return the name at the start of a chain of attributes and subscripts, or an empty string."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
