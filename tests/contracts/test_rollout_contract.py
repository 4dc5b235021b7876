"""Every rollout of the package follows every rule of the contract, and the contract rejects broken rollouts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broken_rollouts import CAUGHT_BY

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.contracts.rollout.suite import RULES, check_rollout
from camshaft.contracts.rules import Rule, Violation
from camshaft.rollout import ROLLOUTS, rollout_class
from camshaft.rollout.base import BaseRollout
from camshaft.rollout.builtin.rollout import TorchRollout

BY_NAME = {rule.name: rule for rule in RULES}
HERE = ("torch", "hf")
"""Rollouts that need only the libraries of the package."""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for tiny models, which are written once and read by all rules."""
    return tmp_path_factory.mktemp("rollout")


SLOW = {"thousands of prompts", "model types", "prompts of mixed lengths"}
"""Rules that take seconds; `make test` checks them on the built-in rollout."""


def cases() -> Iterator[Any]:
    for name in HERE:
        for rule in RULES:
            slow = name != "torch" and rule.name in SLOW
            yield pytest.param(name, rule, id=f"{name}-{rule.name.replace(' ', '_')}", marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("name", "rule"), list(cases()))
def test_rollout_keeps_rule(name: str, rule: Rule, scratch: Path) -> None:
    rule.check(RolloutHarness(rollout_class(name), scratch))


class OneFamily(RolloutHarness):
    """Uses models of one family where a rule does not choose another one."""

    def __init__(self, name: str, folder: Path, family: str):
        super().__init__(rollout_class(name), folder)
        self.family = family

    def empty_case(self, family: str = "qwen2", sizes: dict[str, Any] | None = None, **config: Any) -> Case:
        return super().empty_case(self.family if family == "qwen2" else family, sizes, **config)


FAST = "rows do not depend on the batch"
"""Rule that `make test` checks also with models that cannot be packed."""
OTHER_WEIGHTS = {
    "tied weights load under either name", "weight errors name the weight", "version is that of the weights",
    "digests detect a transposed weight", "half precision is close",
}  # fmt: skip
"""Rules that name weights of the default family, need a square one, or bound the rounding of its layers."""


@pytest.mark.parametrize("family", ["falcon", "mamba"])
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, id=rule.name.replace(" ", "_"), marks=[pytest.mark.slow] * (rule.name != FAST))
        for rule in RULES
        if rule.name not in SLOW | OTHER_WEIGHTS
    ],
)
def test_transformers_keeps_rule_with_models_that_cannot_be_packed(rule: Rule, family: str, scratch: Path) -> None:
    rule.check(OneFamily("hf", scratch, family))


IN_A_PROCESS = (
    "continued rows have the tokens of uninterrupted ones", "continued rows get new tokens only",
    "sleep and wake", "seeds determine samples", "new weights replace old ones", "digests match the weights",
    "rows do not depend on the batch", "rows end", "stop strings end a row", "invalid prompts are rejected",
    "tied weights load under either name", "weight errors name the weight", "digests detect a transposed weight",
    "version is that of the weights", "scores match transformers", "scores and samples agree",
    "scores follow the weights", "invalid scores are rejected",
)  # fmt: skip
"""Rules for `process`, whose results come from the rollout inside; each rule starts one or two processes.

`tests/unit/rollout/test_process_rollout.py` compares its tokens, weights and checksums with those of the same process.
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != IN_A_PROCESS[0])) for name in IN_A_PROCESS],
    ids=lambda name: name.replace(" ", "_"),
)
def test_a_rollout_in_a_separate_process_follows_rule(name: str, scratch: Path) -> None:
    BY_NAME[name].check(RolloutHarness(rollout_class("process"), scratch))


def test_both_generators_that_need_no_other_library_are_tried() -> None:
    assert set(HERE) <= set(ROLLOUTS)


def test_every_rule_has_a_broken_implementation() -> None:
    assert set(CAUGHT_BY.values()) == set(BY_NAME)


@pytest.mark.parametrize("broken", CAUGHT_BY, ids=lambda cls: cls.__name__)
def test_contract_names_the_rule_that_a_broken_rollout_breaks(broken: type[BaseRollout], scratch: Path) -> None:
    with pytest.raises(Violation):
        BY_NAME[CAUGHT_BY[broken]].check(RolloutHarness(broken, scratch))


def test_every_rule_has_a_meaning_and_a_unique_name() -> None:
    assert len(BY_NAME) == len(RULES)
    for rule in RULES:
        assert rule.meaning.endswith("."), rule.name


def test_a_crashing_rollout_does_not_stop_other_rules(scratch: Path) -> None:
    class Crashes(TorchRollout):
        def sleep(self) -> None:
            raise ZeroDivisionError("boom")

    rules = [BY_NAME["sleep and wake"], BY_NAME["no prompts"]]
    verdicts = list(check_rollout(Crashes, str(scratch), rules))
    assert [verdict.rule for verdict in verdicts] == rules
    problem = verdicts[0].problem
    assert problem is not None
    assert re.fullmatch(rf"ZeroDivisionError: boom \({re.escape(__file__)}:\d+ in .*Crashes\.sleep\)", problem)
    assert verdicts[1].problem is None


def test_a_rollout_without_a_method_cannot_be_constructed() -> None:
    class Half(BaseRollout):
        def sleep(self) -> None: ...

    with pytest.raises(TypeError, match="generate_sequences"):
        Half(RolloutEngineConfig(model_path="nowhere"))  # pyright: ignore[reportAbstractUsage]
