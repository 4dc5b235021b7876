"""The messages on the troubleshooting page exist in the package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def texts(path: Path) -> Iterator[str]:
    """Yield the string literals of a module, with `...` for the values in an f-string or a logged message."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [value.value if isinstance(value, ast.Constant) else "..." for value in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sd]|\{\w*\}", "...", node.value)


@pytest.fixture(scope="module")
def literals() -> list[str]:
    return [text for path in (ROOT / "camshaft").rglob("*.py") for text in texts(path)]


def contains(text: str, message: str) -> bool:
    """Return True if the fragments of the message between `...` occur in the text in this order."""
    return bool(re.search(".*?".join(map(re.escape, message.split("..."))), text, re.DOTALL))


def test_the_page_lists_at_least_25_messages() -> None:
    assert len(set(MESSAGES)) == len(MESSAGES) >= 25


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_the_page_exist_in_the_package(message: str, literals: list[str]) -> None:
    fragments = [fragment for fragment in message.split("...") if fragment.strip(" '(),=")]
    assert sum(map(len, fragments)) >= 12
    assert any(contains(text, message) for text in literals)


def test_a_message_that_does_not_exist_is_found(literals: list[str]) -> None:
    assert not any(contains(text, "is not divisible by the cata-parallel size: ...") for text in literals)
