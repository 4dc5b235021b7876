"""The documentation site builds strictly, has no dead link, and requests nothing from another host."""

import importlib.util
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from support.pages import ROOT

TOOL = ROOT / "tools" / "docs_site.py"
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}
"""Attributes whose files a browser requests when it opens a page; `link` has further rules."""


class Page(HTMLParser):
    """Links, requested files and anchors of an HTML page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.requests: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {value for name, value in attrs if name in ("id", "name") and value}
        self.links += [value for name, value in attrs if name in ("href", "src") and value]
        self.requests += [value for name, value in attrs if (tag, name) in LOADED and value]
        if tag == "link" and attributes.get("rel") not in ("canonical", "prev", "next"):
            self.requests.append(attributes.get("href") or "")


def problems(site: Path) -> Iterator[str]:
    """Yield the dead links of a site and the files that it requests from other hosts."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        yield from (f"{path.name} requests {url}" for url in page.requests if urlsplit(url).netloc)
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{path.name} links to {link}"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path.name} links to {link}, which has no such anchor"


def stage_pages(out: Path, root: Path = ROOT) -> None:
    spec = importlib.util.spec_from_file_location("docs_site", TOOL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.stage(root, out)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("build") / "docs"
    process = subprocess.run([sys.executable, TOOL, "--out", out], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    return out / "site"


def test_links_and_anchors_of_the_site_resolve(site: Path) -> None:
    assert len(list(site.glob("*.html"))) > 30
    assert list(problems(site)) == []


def test_the_first_page_is_the_readme(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'id="train-a-model"' in page
    assert 'src="images/first-run.png"' in page
    assert 'href="install.html"' in page
    assert (site / "llms.txt").read_text(encoding="utf-8").startswith("# camshaft\n")


def test_search_index_covers_the_pages(site: Path) -> None:
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    locations = {item["location"].partition("#")[0] for item in items}
    assert {"config.html", "metrics.html", "glossary.html"} <= locations
    assert not any(location.startswith("source/camshaft/") for location in locations)
    texts = " ".join(item["text"] for item in items)
    assert "Karmarkar-Karp" in texts or "split invariance" in texts


def entries(nav: list[Any]) -> Iterator[str]:
    """Yield the pages of a navigation in order."""
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else entries(value)


def test_navigation_lists_every_page_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert [next(iter(part)) for part in nav] == ["Home", "Tutorials", "Guides", "Reference", "Explanation"]
    listed = list(entries(nav))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages | {"index.md", "changelog.md", "contributing.md"})


def test_dead_links_and_foreign_hosts_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        "<h1 id=top></h1><a href='b.html'></a><a href='a.html#no'></a><a href='#top'></a><a href='https://x.org'></a>"
        "<img src='no.png'><script src='https://cdn.example/x.js'></script><link rel=stylesheet href='//cdn.example/y'>"
    )
    assert sorted(problems(tmp_path)) == [
        "a.html links to a.html#no, which has no such anchor",
        "a.html links to b.html",
        "a.html links to no.png",
        "a.html requests //cdn.example/y",
        "a.html requests https://cdn.example/x.js",
    ]


def test_strict_build_fails_on_a_dead_link(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "llms.txt"):
        (root / name).write_text("# Page\n")
    config = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    head, _, tail = config.partition("nav = [")
    (root / "zensical.toml").write_text(head + tail.partition("\n]\n")[2])
    (root / "README.md").write_text("# Page\n\n[dead](#nowhere)\n")
    stage_pages(tmp_path / "out", root)
    program = shutil.which("zensical", path=str(Path(sys.executable).parent))
    assert program
    process = subprocess.run([program, "build", "--strict"], cwd=tmp_path / "out", capture_output=True, timeout=60)
    assert process.returncode != 0
    assert b"anchor does not exist" in process.stdout + process.stderr
