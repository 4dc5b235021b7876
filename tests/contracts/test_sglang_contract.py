"""SGLang keeps every rule of the contract; run by `make test-sglang`, in an environment that has it."""

import pytest
from support.sglang_pool import SGLangPool

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.contracts.rollout.suite import RULES
from camshaft.contracts.rules import Rule

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> RolloutHarness:
    """Tiny models are written once, and engines of one model and one config are shared."""
    # SGLang computes this family with the attention of another, which has no window.
    refused = {"mistral": "a sliding window of 6 tokens"}
    return RolloutHarness(SGLangPool(), tmp_path_factory.mktemp("rollout"), refused=refused)  # pyright: ignore


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "_"))
def test_sglang_keeps_rule(rule: Rule, harness: RolloutHarness) -> None:
    rule.check(harness)
