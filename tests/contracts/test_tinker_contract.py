"""The server of this package follows the rules of the Tinker contract, and the contract rejects broken servers."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from http.client import BadStatusLine
from pathlib import Path
from typing import Any

import pytest
from support.broken_tinker import (
    ALSO_BREAKS,
    CAUGHT_BY,
    GAP_SECONDS,
    IsStrict,
    PollsWith200,
    RefusesAtOnce,
    RefusesScores,
    Routes,
    StepsWithoutEffect,
    running_twin,
)

from camshaft.cli import check_tinker, main
from camshaft.contracts.rules import NotClaimed, Rule, check_claimed
from camshaft.contracts.tinker import client, handshake, losses, order, sampling, scoring, states, updates
from camshaft.contracts.tinker.client import Client
from camshaft.contracts.tinker.harness import Target, TinkerHarness
from camshaft.contracts.tinker.suite import RULES
from camshaft.errors import ConfigError
from camshaft.http import LocalServer, Reply, Request, ServerLimits

BY_NAME = {rule.name: rule for rule in RULES}
MODULES = (handshake, losses, updates, order, sampling, scoring, states)
TOPICS = [[BY_NAME[check.__name__.replace("_", " ")] for check in module.CHECKS] for module in MODULES]
FAST = ("ppo", "gradients add up", "repeated commands run once", "failed chunks fail the step", "seeds decide samples")
"""Rules and twins of `make test`."""


def cases(names: Any) -> Iterator[Any]:
    for value, name in names:
        yield pytest.param(value, id=name.replace(" ", "_"), marks=[pytest.mark.slow] * (name not in FAST))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running_twin(Routes, tmp_path_factory.mktemp("server")) as target:
        yield target


OTHERS = {"two_ranks": {"ranks": 2}, "own_ranks": {"sampling_ranks": 1}, "hf": {"rollout": "hf"}}
"""Servers with other engines and rollouts than the one that twins are made of."""


@pytest.fixture(scope="module", params=list(OTHERS))
def other_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running_twin(Routes, tmp_path_factory.mktemp(request.param), **OTHERS[request.param]) as target:
        yield target


@pytest.mark.slow
@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule.name.replace(" ", "_")) for rule in RULES])
def test_servers_with_other_engines_and_rollouts_keep_rule(rule: Rule[TinkerHarness], other_target: Target) -> None:
    with TinkerHarness(other_target) as harness:
        verdict = check_claimed(rule, harness)
    assert (verdict.problem, verdict.not_claimed) == (None, None)


@pytest.mark.parametrize("rule", list(cases((rule, rule.name) for rule in RULES)))
def test_the_server_keeps_rule(rule: Rule[TinkerHarness], target: Target) -> None:
    with TinkerHarness(target) as harness:
        rule.check(harness)


@pytest.mark.parametrize("broken", list(cases(CAUGHT_BY.items())))
def test_contract_names_the_rule_that_a_broken_server_breaks(broken: Any, tmp_path: Path) -> None:
    with running_twin(broken, tmp_path) as target, TinkerHarness(target) as harness:
        verdict = check_claimed(BY_NAME[CAUGHT_BY[broken]], harness)
    assert verdict.problem is not None, verdict.not_claimed
    assert not verdict.problem.startswith("AssertionError")


@pytest.mark.slow
@pytest.mark.parametrize("broken", [pytest.param(kind, id=kind.__name__) for kind in CAUGHT_BY])
def test_a_broken_server_breaks_no_rule_beyond_the_table(broken: Any, tmp_path: Path) -> None:
    """All rules of the topic are checked. An error of Python would mean that the server breaks by accident."""
    rules = next(rules for rules in TOPICS if BY_NAME[CAUGHT_BY[broken]] in rules)
    with running_twin(broken, tmp_path) as target:
        problems = dict[str, str]()
        for rule in rules:
            with TinkerHarness(target) as harness:
                problem = check_claimed(rule, harness).problem
            if problem is not None:
                problems[rule.name] = problem
    assert CAUGHT_BY[broken] in problems
    assert problems.keys() - {CAUGHT_BY[broken]} <= ALSO_BREAKS.get(broken, set())
    assert not [problem for problem in problems.values() if re.search(r"\b(Type|Value|Attribute|Key)Error\b", problem)]


def test_a_server_that_refuses_a_feature_does_not_claim_its_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_twin(RefusesScores, tmp_path) as target:
        with TinkerHarness(target) as harness, pytest.raises(NotClaimed, match="prompt_logprobs is not supported"):
            BY_NAME["prompts have log probs"].check(harness)
        arguments = [f"key={target.key}", f"model={target.folder}", "--rule", "prompts have log"]
        assert main(["check-tinker", target.url, *arguments]) == 0
    assert "1 of 2 rules hold, 1 are not claimed" in capsys.readouterr().out


def test_a_server_may_answer_polls_with_200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SECONDS", GAP_SECONDS / 2)  # in which other results arrive
    with running_twin(PollsWith200, tmp_path) as target, TinkerHarness(target) as harness:
        BY_NAME["gaps end"].check(harness)


@pytest.mark.parametrize(
    ("name", "server"),
    [
        ("failed chunks fail the step", RefusesAtOnce),
        ("models are usable after failures", RefusesAtOnce),
        ("steps need gradients", RefusesAtOnce),
        ("invalid settings are errors", RefusesAtOnce),
        ("invalid settings are errors", StepsWithoutEffect),
    ],
)
def test_a_server_may_refuse_commands_at_once(name: str, server: type[Routes], tmp_path: Path) -> None:
    with running_twin(server, tmp_path) as target, TinkerHarness(target) as harness:
        BY_NAME[name].check(harness)


class Page:
    """A server of something else, with the same body for all requests."""

    def __init__(self, body: bytes):
        self.body = body

    def refuse(self, request: Request) -> Reply | None:
        return None

    def answer(self, request: Request) -> Reply:
        return Reply(200, self.body)


@pytest.mark.parametrize("body", [b"<html></html>", b"{}", b"[]", b'{"supported_models": [{"name": "a"}]}'])
def test_another_server_is_named(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with LocalServer(Page(body), ServerLimits()) as server:
        server.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["check-tinker", url, "key=tml-x", "model=m"]) == 2
    assert f"{url} is not a server of the Tinker API" in " ".join(capsys.readouterr().err.split())


def test_a_session_that_cannot_be_ended_does_not_end_the_suite(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(client: Client) -> None:
        raise BadStatusLine("x")

    monkeypatch.setattr(Client, "finish", fail)
    with TinkerHarness(target) as harness:
        harness.client()


def test_a_restart_that_does_not_kill_the_server_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_tinker, "END_SECONDS", 0.2)
    program = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    command = [sys.executable, "-c", f"{program}; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        with pytest.raises(ConfigError, match=r"the server was not killed: .* --restart true, a connection"):
            check_tinker._restart("true", url, lambda: True)()
        check_tinker._restart(f"kill -9 {process.pid}", url, lambda: True)()


def test_every_rule_has_a_broken_server() -> None:
    assert set(CAUGHT_BY.values()) == set(BY_NAME)


def test_the_command_prints_states_and_returns_1_for_a_broken_rule(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"key={target.key}", f"model={target.folder}", "--rule", "fields are", "--json"]
    assert main(["check-tinker", target.url, *arguments]) == 0
    states = [rule["state"] for rule in json.loads(capsys.readouterr().out)["rules"]]
    assert states == ["holds", "holds"]
    with running_twin(IsStrict, tmp_path) as strict:
        assert main(["check-tinker", strict.url, f"key={strict.key}", *arguments[1:]]) == 1
    states = {rule["rule"]: rule["state"] for rule in json.loads(capsys.readouterr().out)["rules"]}
    assert states == {"unknown fields are ignored": "broken", "missing fields are named": "holds"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["key=tml-x"], "needs key=KEY of the server, and model=FOLDER"),
        (["key=tml-x", "model=m", "folder=x"], "'folder=x' is not an argument of check-tinker; its keys are key"),
        (["key=tml-x", "model=m", "dtype=int8"], "dtype=int8 is unknown; set float32"),
        (["key=tml-x", "model=m", "gap_timeout=soon"], "gap_timeout=soon is not a number"),
        (["key=tml-x", "model=m"], "does not answer: "),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-tinker", "http://127.0.0.1:9", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_every_rule_has_a_meaning_and_a_unique_name() -> None:
    assert len(BY_NAME) == len(RULES)
    for rule in RULES:
        assert rule.meaning.endswith("."), rule.name
