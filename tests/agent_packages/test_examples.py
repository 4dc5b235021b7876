"""The examples of programs and of other libraries: the game through a class and through programs, and adapters.

make test-agents
"""

import os
import runpy
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.endpoints import LIMITS, SAMPLING, Policy

from camshaft.agents.endpoint import Endpoint
from camshaft.agents.environment import Host, Message, Start, Turn
from camshaft.agents.episode import Episode
from camshaft.agents.jobs import ProgramSpec
from camshaft.agents.messages import Source
from camshaft.agents.play import Question, play
from camshaft.agents.programs import ProgramPool
from camshaft.rollout import open_stream

pytestmark = pytest.mark.agents
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "agents"
PACKAGES = ROOT / ".venv-agents"
VERIFIERS = ROOT / ".venv-verifiers" / "bin"
PROMPT: list[Message] = [{"role": "user", "content": "Play. "}]
QUESTIONS = [
    Question(
        PROMPT,
        Start({"prompt": PROMPT, "ground_truth": number, "taskset": "guess", "index": number - 1}),
        sampling_seed=number,
    )
    for number in range(1, 10)
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def expected(policy: Policy) -> list[Episode]:
    """Return the episodes of the game through its class."""
    game = runpy.run_path(str(EXAMPLES / "higher_lower.py"))["HigherLower"]
    return play(policy.rollout, Host({"": game}), QUESTIONS, policy.bridge, LIMITS, SAMPLING)


def check_program(command: str, policy: Policy, expected: list[Episode], output: Path) -> None:
    """Run a program for the questions of `expected`, and compare its episodes."""
    pool = ProgramPool(ProgramSpec(Source("", command), 300.0, 200.0, 4, [str(PACKAGES)]), output)
    with open_stream(policy.rollout) as stream, Endpoint(stream, policy.bridge, LIMITS, SAMPLING, "policy") as endpoint:
        sessions = pool.play(endpoint, QUESTIONS[: len(expected)])
    pool.close()
    for (row,), episode in zip(sessions, expected, strict=True):
        assert row.fault is None, output.read_text()
        assert (row.prompt, row.tokens, row.mask) == (episode.prompt, episode.tokens, episode.mask)
        assert (row.rewards, row.stop_reason) == (episode.rewards, episode.stop_reason)
        assert row.log_probs == pytest.approx(episode.log_probs, abs=1e-6)


@pytest.mark.parametrize("target", ["{folder}/openai_client/agent.py:solve", "{python} {folder}/command_line/agent.py"])
def test_a_program_equals_the_class(policy: Policy, expected: list[Episode], target: str, tmp_path: Path) -> None:
    check_program(target.format(folder=EXAMPLES, python=sys.executable), policy, expected, tmp_path / "output.log")


@pytest.mark.timeout(600)
def test_a_taskset_of_verifiers_equals_the_class(policy: Policy, expected: list[Episode], tmp_path: Path) -> None:
    """Its harness is a script whose packages uv installs, for which it may need the certificates of this machine."""
    kept = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(("SSL_CERT", "UV_"))]
    environment = shlex.join([f"PATH={VERIFIERS}:{os.environ['PATH']}", *kept])
    command = f"env {environment} python {EXAMPLES}/verifiers/agent.py"
    check_program(command, policy, expected[:3], tmp_path / "output.log")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Start the example server of OpenEnv, and return its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--app-dir",
        str(EXAMPLES / "openenv"),
        "server:app",
        "--port",
        str(port),
    ]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(PACKAGES)}, stdout=log, stderr=log)
    try:
        limit = time.monotonic() + 120
        while not is_listening(port):
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < limit
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_an_environment_server_equals_the_class(policy: Policy, expected: list[Episode], server: str) -> None:
    game = runpy.run_path(str(EXAMPLES / "openenv" / "game.py"))["Game"]
    played = play(policy.rollout, Host({"": game}, {"url": server}), QUESTIONS, policy.bridge, LIMITS, SAMPLING)
    for row, episode in zip(played, expected, strict=True):
        assert row.fault is None
        assert (row.prompt, row.tokens, row.mask) == (episode.prompt, episode.tokens, episode.mask)
        assert (row.rewards, row.stop_reason) == (episode.rewards, episode.stop_reason)
        assert row.log_probs == episode.log_probs


def said(turn: Any) -> str:
    assert isinstance(turn, Turn)
    return str(turn.said)


def test_a_tower_of_hanoi_is_solved() -> None:
    host = Host({"": runpy.run_path(str(EXAMPLES / "textarena/game.py"))["Game"]})
    assert "A: [3, 2, 1]" in said(host.reset({0: Start({}, seed=1)})[0])
    moves = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]
    turns = [host.step({0: f"[{move}]"})[0] for move in moves]
    assert "C: [1]" in said(turns[0])
    assert "A: [3, 2, 1]" not in said(turns[0])  # only what is new
    assert turns[-1]._replace(seconds=0) == Turn(None, 1.0, True)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_wrong_answer_gets_a_second_try() -> None:
    task = runpy.run_path(str(EXAMPLES / "reasoning_gym/game.py"))["Task"]
    played = task()
    question = played.reset(seed=3)
    assert played.step("no number")[1:] == (0.0, False)
    assert played.step(played.entry["answer"])[1:] == (1.0, True)
    assert played.reset(seed=3) == question != played.reset(seed=4)
