"""The rollout contract on vLLM's server; run by `make test-server` in an environment with vLLM."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import Servers

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.contracts.rollout.suite import RULES
from camshaft.contracts.rules import Rule

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

SIZES = {"hidden": 128}
"""vLLM's attention on a CPU has heads of at least 32 elements; tiny models have four heads."""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for tiny models, shared by all rules."""
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers(keep=2)
    yield servers
    servers.end()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.replace(" ", "_"))
def test_a_server_keeps_rule(rule: Rule, scratch: Path, servers: Servers) -> None:
    build: Any = servers.rollout
    rule.check(RolloutHarness(build, scratch, sizes=SIZES))
