"""The rollout contract on vLLM; run by `make test-vllm` in an environment with vLLM."""

from pathlib import Path

import pytest

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.contracts.rollout.suite import RULES
from camshaft.contracts.rules import Rule
from camshaft.rollout import rollout_class

pytestmark = pytest.mark.vllm

SIZES = {"hidden": 128}
"""vLLM's attention on a CPU has heads of at least 32 elements; tiny models have four heads."""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for tiny models; rules share the engines of one model and config."""
    return tmp_path_factory.mktemp("rollout")


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[pytest.mark.slow] * (rule.name == "thousands of prompts")) for rule in RULES],
    ids=lambda rule: rule.name.replace(" ", "_"),
)
def test_vllm_keeps_rule(rule: Rule, scratch: Path) -> None:
    rule.check(RolloutHarness(rollout_class("vllm"), scratch, sizes=SIZES))
