"""The homes of a config key: the files of the package that write its name.

A file writes a name as a field or a keyword in `config`, or in a string that is not a sentence. A read, such as
`config.lora_rank`, is no home. Names of one word are left out, because they have other meanings too. The tables of
names of other libraries are no homes: they contain each key with another name there, and decide nothing about it.
"""

import ast
import re
from collections.abc import Iterator

from architecture.source import PACKAGE, Modules, docstrings

WORD = re.compile(r"[A-Za-z_]\w*")
SCHEMA = (f"{PACKAGE}.config.schema", f"{PACKAGE}.config.backends")
"""Modules whose classes declare the keys."""


TABLES = f"{PACKAGE}.config.foreign"
"""Tables of names of other libraries."""


def find_homes(modules: Modules) -> dict[str, set[str]]:
    """Return the homes of each key of several words."""
    homes: dict[str, set[str]] = {name: set() for name in keys(modules)}
    for module, tree in modules.items():
        if module.startswith(TABLES):
            continue
        for name in homes.keys() & set(_written(tree, is_config=module.startswith(f"{PACKAGE}.config"))):
            homes[name].add(module.partition(".")[2])
    return homes


def keys(modules: Modules) -> set[str]:
    """Return the last names of the keys that consist of several words."""
    classes = (
        node
        for module, tree in modules.items()
        if module.startswith(SCHEMA)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    fields = (item.target for node in classes for item in node.body if isinstance(item, ast.AnnAssign))
    return {field.id for field in fields if isinstance(field, ast.Name) and "_" in field.id.strip("_")}


def _written(tree: ast.Module, is_config: bool) -> Iterator[str]:
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            if " " not in node.value.strip():
                yield from WORD.findall(node.value)
        elif is_config and isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif is_config and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
