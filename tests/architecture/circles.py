"""Import circles between modules.

Imports inside of functions count, because a circle that is hidden from the interpreter is still one for readers.
Imports for type checkers do not. A name that a package re-exports counts as an import of the module that defines it.
"""

import ast
from collections.abc import Iterable

from architecture.source import PACKAGE, Modules, runtime_nodes

Imports = dict[str, set[str]]
"""The modules that each module imports."""


def find_imports(modules: Modules) -> Imports:
    """Return the imports between modules."""
    exports = {module: {name: origin for name, *origin in _from_imports(tree.body)} for module, tree in modules.items()}
    packages = {module.rpartition(".")[0] for module in modules}

    def home(module: str, name: str) -> str:
        """Return the module that defines a name, which may be the module of that name."""
        if f"{module}.{name}" in modules:
            return f"{module}.{name}"
        if module in packages and name in exports.get(module, {}):
            return home(*exports[module][name])
        return module

    imports = {}
    for module, tree in modules.items():
        nodes = list(runtime_nodes(tree))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {home(*origin) for _, *origin in _from_imports(nodes)}
        imports[module] = (imported & modules.keys()) - {module}
    return imports


def _from_imports(nodes: Iterable[ast.AST]) -> list[tuple[str, str, str]]:
    """Return the imported names of the package, each with its module and its name there."""
    return [
        (alias.asname or alias.name, node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE
        for alias in node.names
    ]


def circles(imports: Imports) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reached = {module: _reachable(module, imports) for module in imports}
    groups = {tuple(sorted(other for other in reached[module] if module in reached[other])) for module in imports}
    return [list(group) for group in sorted(groups) if group]


def _reachable(module: str, imports: Imports) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found
