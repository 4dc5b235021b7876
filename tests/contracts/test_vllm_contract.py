"""vLLM keeps every rule of the contract; run by `make test-vllm`, in an environment that has it."""

from pathlib import Path

import pytest

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.contracts.rollout.suite import RULES
from camshaft.contracts.rules import Rule
from camshaft.rollout import rollout_class

pytestmark = pytest.mark.vllm

SIZES = {"hidden": 128}
"""vLLM's attention on a CPU has heads of 32 numbers and more; tiny models have four heads."""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models are written once. Engines of one model and one config are shared too, asleep between rules."""
    return tmp_path_factory.mktemp("rollout")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "_"))
def test_vllm_keeps_rule(rule: Rule, scratch: Path) -> None:
    rule.check(RolloutHarness(rollout_class("vllm"), scratch, sizes=SIZES))
