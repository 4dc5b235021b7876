"""Pages that repeat what the code knows say the same as the code."""

from pathlib import Path

from camshaft.config import reference_page
from camshaft.engine import ENGINES
from camshaft.engine.contract import RULES
from camshaft.rollout import ROLLOUTS

ROOT = Path(__file__).parents[2]


def test_the_reference_of_keys_is_the_one_that_the_schema_writes() -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == reference_page(), "run: make docs"


def test_the_page_on_engines_lists_every_rule_of_the_contract() -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"| {rule.name} | {rule.meaning} |" in page, rule.name


def test_the_readme_names_every_engine_and_rollout_that_is_there() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (*ENGINES, *ROLLOUTS):
        assert f"`{name}`" in page, name
