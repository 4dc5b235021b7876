"""The local controller backend follows every rule of the contract, and the contract rejects broken backends.

`tests/ray_controller/test_one_machine.py` checks the rules on Ray.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ranks  # noqa: F401  (preloads the fork server)
from support.broken_controllers import FAULTS

from camshaft.contracts.controller.harness import ControllerHarness, Start
from camshaft.contracts.controller.suite import RULES, check_controller
from camshaft.contracts.rules import Rule, Violation
from camshaft.controller import Dispatch, group
from camshaft.controller.local import start as start_local
from camshaft.errors import WorkerError

BY_NAME = {rule.name: rule for rule in RULES}
TIMED = {
    "pools run at once", "exceptions reach the driver", "late ranks are reported", "killed ranks are errors",
    "deaths between calls are detected", "deaths end waits for other pools", "suspended ranks do not block",
    "restorable pools start again",
}  # fmt: skip
"""Rules with time limits, which must not run in parallel with other tests."""


def cases() -> Iterator[object]:
    for rule in RULES:
        marks = [pytest.mark.alone] * (rule.name in TIMED)
        yield pytest.param(start_local, rule, id=f"local-{rule.name.replace(' ', '_')}", marks=marks)


@pytest.mark.parametrize(("start", "rule"), list(cases()))
def test_backend_keeps_rule(start: Start, rule: Rule[ControllerHarness], tmp_path: Path) -> None:
    rule.check(ControllerHarness(start, tmp_path))


@pytest.mark.parametrize(
    ("start", "rule", "message"), [pytest.param(*case, id=f"{name}-{case[1]}") for name, *case in FAULTS]
)
def test_contract_detects_fault(start: Start, rule: str, message: str | None, tmp_path: Path) -> None:
    with pytest.raises(WorkerError if message else Violation, match=message):
        BY_NAME[rule].check(ControllerHarness(start, tmp_path))


def test_contract_detects_methods_that_need_no_decorator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "registered_methods", lambda role: dict.fromkeys(dir(role), Dispatch.ONE_TO_ALL))
    with pytest.raises(Violation):
        BY_NAME["unregistered methods are rejected"].check(ControllerHarness(start_local, tmp_path))


def test_every_rule_detects_a_fault() -> None:
    assert {rule for _, _, rule, _ in FAULTS} | {"unregistered methods are rejected"} == set(BY_NAME)


def test_rules_have_meanings_and_unique_names() -> None:
    assert len(BY_NAME) == len(RULES)
    assert set(BY_NAME) >= TIMED
    for rule in RULES:
        assert rule.meaning.endswith("."), rule.name


def test_a_crashing_rule_does_not_stop_the_others(tmp_path: Path) -> None:
    rules = [BY_NAME["results must pickle"], BY_NAME["calls run in order"]]

    def crashing(specs, options):
        crashing.calls += 1
        if crashing.calls == 1:
            raise ZeroDivisionError("boom")
        return start_local(specs, options)

    crashing.calls = 0
    verdicts = list(check_controller(crashing, str(tmp_path), rules))
    assert [verdict.problem for verdict in verdicts] == ["ZeroDivisionError: boom", None]
