"""Each module that deletes, renames or replaces files is listed in docs/deleting.md with the rule that it follows.

A call is found by the name of the function. A module with a new call fails until its count and the page are updated.
"""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "camshaft"
METHODS = {
    *("rmtree", "unlink", "rmdir", "removedirs", "rename", "renames", "copy2", "copyfile", "copytree", "ftruncate"),
    *("write_text", "write_bytes", "touch", "rm", "rm_file", "pipe_file", "put_file", "save_pretrained", "save_file"),
    *(
        "mkdtemp",
        "mkstemp",
        "NamedTemporaryFile",
        "TemporaryDirectory",
        "write_table",
        "ParquetWriter",
        "SummaryWriter",
    ),
}
AMBIGUOUS = {"remove", "replace", "move", "copy", "truncate"}
"""Names that strings, lists and tensors also have. They count as functions of `os` and `shutil`."""
WRITES = re.compile(r"""['"][rbt]*[wax+][rbwt+]*['"]|O_(CREAT|TRUNC|RDWR|WRONLY)""")
"""Arguments of `open` for writing."""


def calls(path: Path) -> Counter[str]:
    """Count the calls in a module that can delete, truncate, rename or overwrite a file."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            is_path = name == "replace" and owner not in ("", "dataclasses") and len(node.args) == 1
            is_open = name == "open" and WRITES.search(ast.unparse(node))
            if name in METHODS or is_open or is_path or (name in AMBIGUOUS and owner in ("os", "shutil")):
                found[name] += 1
    return found


def listed() -> dict[str, int]:
    """Return the number of calls per module, according to the page."""
    page = (ROOT / "docs" / "deleting.md").read_text(encoding="utf-8")
    return {name: int(count) for name, count in re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", page, re.MULTILINE)}


def test_each_call_that_deletes_is_listed() -> None:
    found = {str(path.relative_to(PACKAGE)): calls(path) for path in sorted(PACKAGE.rglob("*.py"))}
    counts = {name: sum(counter.values()) for name, counter in found.items() if counter}
    assert counts == listed(), {name: dict(found[name]) for name in counts if counts[name] != listed().get(name)}
