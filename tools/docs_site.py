"""Stage the documentation pages and build the site from them.

    python tools/docs_site.py [--out build/docs]      # the site is build/docs/site/index.html

Pages link to files outside `docs`, such as sources and results. The site has a page for each of these files, below
`source`, so that every link works both in the repository and in the site, without a network. `README.md` is the first
page, and `llms.txt` a file of the site.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
TOP_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
"""Files of the repository's root and their pages in the site."""

LINK = re.compile(r"(?<=\]\()(?!https?://|mailto:)([^)\s#]+)(#[^)\s]+)?(?=\))")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
"""Front matter of pages that search does not list."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="folder (default: build/docs)")
    out = parser.parse_args().out.resolve()
    stage(ROOT, out)
    status = subprocess.run([Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"], cwd=out)
    return status.returncode


def stage(root: Path, out: Path) -> None:
    """Write the config of the site and all its pages to `out`."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(root / "zensical.toml", out)
    Stage(root, out / "pages").run()


class Stage:
    """Copies pages, and the files that they link to, with links that hold in the site."""

    def __init__(self, root: Path, target: Path):
        self.root, self.target = root, target
        self.waiting: list[Path] = []
        self.pages: dict[Path, PurePosixPath] = {}
        """Path in the site of each file of the repository, relative to `root`."""

    def run(self) -> None:
        for path in sorted((self.root / "docs").rglob("*")):
            if path.is_file():
                self._add(path.relative_to(self.root))
        for name in TOP_PAGES:
            self._add(Path(name))
        while self.waiting:
            self._write(self.waiting.pop())
        shutil.copy(self.root / "llms.txt", self.target)

    def _add(self, path: Path) -> PurePosixPath:
        """Return the path of a file or folder in the site, and queue it for `_write` the first time."""
        if path not in self.pages:
            self.pages[path] = self._place(path)
            self.waiting.append(path)
        return self.pages[path]

    def _place(self, path: Path) -> PurePosixPath:
        if path.parts[0] == "docs":
            return PurePosixPath(*path.parts[1:])
        if str(path) in TOP_PAGES:
            return PurePosixPath(TOP_PAGES[str(path)])
        if (self.root / path).is_dir():
            return PurePosixPath("source", *path.parts, "index.md")
        return PurePosixPath("source", *path.parts).with_name(path.name if path.suffix == ".md" else f"{path.name}.md")

    def _write(self, path: Path) -> None:
        source, target = self.root / path, self.target / self.pages[path]
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.write_text(self._listing(path), encoding="utf-8")
        elif path.suffix == ".md":
            text = self._relink(path, source.read_text(encoding="utf-8"))
            is_page = path.parts[0] == "docs" or str(path) in TOP_PAGES
            target.write_text(text if is_page else HIDDEN + text, encoding="utf-8")
        elif path.parts[0] == "docs":
            shutil.copy(source, target)  # an image
        else:
            code, language = source.read_text(encoding="utf-8"), LANGUAGES.get(path.suffix, "text")
            target.write_text(f"{HIDDEN}# {path}\n\n````{language}\n{code}\n````\n", encoding="utf-8")

    def _relink(self, path: Path, text: str) -> str:
        """Return the text of a page with links to the pages of the site."""

        def place(match: re.Match[str]) -> str:
            target = Path(os.path.normpath(path.parent / match[1]))
            return os.path.relpath(self._add(target), self.pages[path].parent) + (match[2] or "")

        parts = FENCED.split(text)
        return "".join(part if part.lstrip().startswith("```") else LINK.sub(place, part) for part in parts)

    def _listing(self, path: Path) -> str:
        """Return a page with links to the files of a folder."""
        entries = sorted(entry for entry in (self.root / path).iterdir() if entry.is_file())
        places = {entry.name: self._add(path / entry.name) for entry in entries}
        lines = [f"- [{name}]({os.path.relpath(place, self.pages[path].parent)})" for name, place in places.items()]
        return "\n".join([f"{HIDDEN}# {path}", "", *lines, ""])


if __name__ == "__main__":
    sys.exit(main())
