"""Write AGENTS.md and llms.txt, which describe the repository for coding agents and language models.

    python tools/agent_pages.py

Both are generated from the documentation: AGENTS.md from CONTRIBUTING.md and the list of pages, and llms.txt from the
README and the pages, each with its first sentences.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AGENTS, INDEX = ROOT / "AGENTS.md", ROOT / "llms.txt"
SECTIONS = ("Set up and test", "Where things go", "Language", "Code", "Tests")
"""Sections of CONTRIBUTING.md for whoever changes the code."""
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
FROM = "Generated from the documentation by `python tools/agent_pages.py`; a test checks that it is up to date."


def paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a page on one line each, headings included."""
    text = path.read_text(encoding="utf-8")
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]


def summary(path: Path) -> str:
    """Return the first paragraph of a page without links."""
    title, first, *_ = paragraphs(path)
    assert title.startswith("# "), path
    return LINK.sub(r"\1", first)


def title(path: Path) -> str:
    return paragraphs(path)[0].removeprefix("# ")


def navigation() -> Iterator[tuple[str, list[Path]]]:
    """Yield the parts of the site with the files of their pages in the repository."""
    nav: list[dict[str, Any]] = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    names = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
    for part in nav:
        ((name, entries),) = part.items()
        if isinstance(entries, list):
            pages = [next(iter(entry.values())) for entry in entries]
            yield name, [Path(names.get(page, f"docs/{page}")) for page in pages]


def section(path: Path, name: str) -> str:
    """Return a section of a page with its heading."""
    text = path.read_text(encoding="utf-8")
    start = text.index(f"\n## {name}\n") + 1
    end = text.find("\n## ", start)
    return text[start : end if end > 0 else None].strip()


def agents() -> str:
    """Return AGENTS.md."""
    parts = ["# Instructions for coding agents", summary(ROOT / "README.md"), FROM]
    parts += [section(ROOT / "CONTRIBUTING.md", name) for name in SECTIONS]
    lines = [f"- `{path}`: {title(ROOT / path)}" for _, paths in navigation() for path in paths]
    return "\n\n".join([*parts, "## Pages", "\n".join(lines)]) + "\n"


def index() -> str:
    """Return llms.txt, in the format of llmstxt.org."""
    parts = ["# camshaft", f"> {summary(ROOT / 'README.md')}", FROM]
    for name, paths in navigation():
        lines = [f"- [{title(ROOT / path)}]({path}): {summary(ROOT / path)}" for path in paths]
        parts += [f"## {name}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    AGENTS.write_text(agents(), encoding="utf-8")
    INDEX.write_text(index(), encoding="utf-8")
