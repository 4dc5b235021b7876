"""Docstrings, pages and messages use the vocabulary of the field."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "camshaft").rglob("*.py"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]

WH_OPENING = re.compile(r"(What|Whether|Where|That|Who|How|Which)\b")
RETIRED = re.compile(
    r"\b(the map above|longest gradient|refused by name|not there yet|put aside|hand-over|handed over|let go of"
    r"|way back|told so|likewise|in vain|goes on|go on from|of one's own|words of the vocabulary)\b",
    re.IGNORECASE,
)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def test_docstrings_open_with_a_verb_or_a_noun_phrase() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in docstrings(path)
        if WH_OPENING.match(text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_retired_phrases_do_not_return(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    matches = {match.group() for match in RETIRED.finditer(text)}
    assert not matches, f"see docs/glossary.md; replace {sorted(matches)}"
