"""Documentation pages that repeat facts of the code agree with the code."""

import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from camshaft.algorithms import mismatch
from camshaft.config import reference_page
from camshaft.contracts.engine.suite import RULES
from camshaft.contracts.rollout.suite import RULES as ROLLOUT_RULES
from camshaft.contracts.rules import Rule, rule_table
from camshaft.contracts.tinker.suite import RULES as TINKER_RULES
from camshaft.controller.ray import FORWARDED
from camshaft.controller.resources import Node, PoolSpec, shortage
from camshaft.engine import ENGINES
from camshaft.parity.diagnosis import CauseKind
from camshaft.rollout import ROLLOUTS
from camshaft.tracking import TRACKERS
from camshaft.tracking.names import reference_page as reference_of_metrics

ROOT = Path(__file__).parents[2]


def test_the_config_page_is_generated_from_the_schema() -> None:
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == reference_page(), "run: make docs"


def test_the_metrics_page_is_generated_from_the_table() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == reference_of_metrics(), "run: make docs"


@pytest.mark.parametrize("name", ["api", "command-line", "families"])
def test_pages_of_tools_are_up_to_date(name: str) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / f"{name.replace('-', '_')}_page.py"))
    assert tool["PAGE"].read_text(encoding="utf-8") == tool["page"](), "run: make docs"


def test_tables_of_names_of_other_libraries_are_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "foreign_tables.py"))
    for page, (library, tables) in tool["TABLES"].items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text == tool["page"](text, library, tables), "run: make docs"


def test_files_for_agents_are_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "agent_pages.py"))
    assert tool["AGENTS"].read_text(encoding="utf-8") == tool["agents"](), "run: make docs"
    assert tool["INDEX"].read_text(encoding="utf-8") == tool["index"](), "run: make docs"
    assert "](docs/install.md): This page shows how to install" in tool["index"]()
    assert "make test-fast" in tool["agents"]()


def test_the_table_of_memory_is_that_of_the_forecasts() -> None:
    results = (ROOT / "benchmarks" / "results" / "memory_table.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in results.splitlines() if line.startswith("|"))
    assert table.count("\n") > 20
    assert table in (ROOT / "docs" / "what-fits.md").read_text(encoding="utf-8")


def test_the_page_on_tracking_has_every_tracker() -> None:
    page = (ROOT / "docs" / "tracking.md").read_text(encoding="utf-8")
    for name in TRACKERS:
        assert f"\n| `{name}`" in page, name


@pytest.mark.parametrize(
    ("name", "rules"), [("engines", RULES), ("rollouts", ROLLOUT_RULES), ("tinker-servers", TINKER_RULES)]
)
def test_pages_contain_the_generated_table_of_rules(name: str, rules: Sequence[Rule[Any]]) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    before, table, after = page.partition(rule_table(rules))
    assert table, "run: make docs"
    assert before.endswith("\n\n")
    assert after[:1] in ("", "\n")


def test_the_page_on_mismatch_explains_every_metric_of_it() -> None:
    page = (ROOT / "docs" / "mismatch.md").read_text(encoding="utf-8")
    one = torch.zeros(1)
    for name in mismatch(one, one, one == 0, torch.tensor([1])):
        assert f"| `rollout/{name}` |" in page, name
    for kind in get_args(CauseKind):
        assert f"| `{kind}` |" in page, kind


def test_the_readme_names_every_engine_and_rollout() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (*ENGINES, *ROLLOUTS):
        assert f"`{name}`" in page, name


def test_cluster_page_shows_the_error_of_a_small_cluster() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    actor = PoolSpec("global_pool", 2, 8, "cuda", roles=("actor_rollout_ref",))
    critic = PoolSpec("critic_pool", 1, 4, "cuda", roles=("critic",))
    resources = {"GPU": 8, "CPU": 64}
    assert (
        str(shortage([actor, critic], [Node("10.0.0.1", resources, resources), Node("10.0.0.2", resources, resources)]))
        in page
    )


def test_the_cluster_page_lists_every_forwarded_variable() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    names = re.findall("[A-Z]+", FORWARDED.pattern)
    assert "NCCL" in names
    for name in names:
        assert f"`{name}_`" in page or f"`{name}`" in page, name
