"""Documentation pages have no dead link, no code block that nobody runs, and no key that does not exist."""

import re
import tomllib
from pathlib import Path

import pytest
from support.pages import blocks, pages

from camshaft.config import PPOConfig
from camshaft.config.schema.aliases import ALIASES
from camshaft.config.tree import fields

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINK = re.compile(r"\]\((?!https?://)([^)\s#]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


def slugs(page: Path) -> set[str]:
    """Return the anchors of a page, formed from its headings as repository hosts and the site form them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*pages(), Path("CHANGELOG.md")], ids=str)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for target, anchor in LINK.findall(text):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        assert not anchor or path.suffix != ".md" or anchor in slugs(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", pages(), ids=str)
def test_every_code_block_has_a_language(page: Path) -> None:
    assert [block.line for block in blocks(page) if not block.language] == []


def test_make_commands_of_pages_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, flags=re.MULTILINE))
    texts = [block.text for page in pages() for block in blocks(page)]
    names = {name for text in texts for name in re.findall(r"^make ([\w-]+)", text, flags=re.MULTILINE)}
    assert names
    assert names <= targets


def test_extras_of_pages_exist() -> None:
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in pages()]
    names = {
        name for text in texts for extras in re.findall(r"install '\.\[([\w,-]+)\]", text) for name in extras.split(",")
    }
    assert names
    assert names <= set(PROJECT["optional-dependencies"])


KEY = re.compile(r"`((?:actor_rollout_ref|critic|algorithm|data|trainer|reward_model|custom_reward_function)\.[\w.]+)")


@pytest.mark.parametrize(("name", "count"), [("from-trl", 50), ("from-verl", 70)])
def test_migration_tables_name_existing_keys(name: str, count: int) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").partition("## Not in camshaft")[0]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    keys = {key for _, camshaft, *_ in rows for key in KEY.findall(camshaft)}
    assert len(keys) > count
    assert keys <= {*fields(PPOConfig), *ALIASES}
