"""The rollout contract on SGLang; run by `make test-sglang` in an environment with SGLang."""

import pytest
from support.sglang_pool import SGLangPool

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.contracts.rollout.suite import RULES
from camshaft.contracts.rules import Rule

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> RolloutHarness:
    """Return a harness whose rules share tiny models, and the engines of one model and config."""
    # SGLang's class for this architecture has no sliding window.
    unsupported = {"mistral": "a sliding window of 6 tokens"}
    return RolloutHarness(SGLangPool(), tmp_path_factory.mktemp("rollout"), unsupported=unsupported)  # pyright: ignore


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "_"))
def test_sglang_keeps_rule(rule: Rule, harness: RolloutHarness) -> None:
    rule.check(harness)
