"""The examples of programs and of other libraries: the game through a class and through programs, and adapters.

make test-agents
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from support.endpoints import LIMITS, SAMPLING, Policy

from camshaft.agents.endpoint import Endpoint
from camshaft.agents.environment import Host, Start, Turn
from camshaft.agents.episode import Episode
from camshaft.agents.jobs import ProgramSpec
from camshaft.agents.messages import Source
from camshaft.agents.play import Question, play
from camshaft.agents.programs import ProgramPool
from camshaft.rollout import open_stream

pytestmark = pytest.mark.openai
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "agents"
PACKAGES = ROOT / ".venv-agents"
QUESTIONS = [
    Question(
        [{"role": "user", "content": "Play. "}],
        Start({"ground_truth": number, "prompt": [{"role": "user", "content": "Play. "}]}),
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


@pytest.mark.parametrize("target", ["{folder}/openai_client/agent.py:solve", "{python} {folder}/command_line/agent.py"])
def test_a_program_equals_the_class(policy: Policy, expected: list[Episode], target: str, tmp_path: Path) -> None:
    source = Source("", target.format(folder=EXAMPLES, python=sys.executable))
    pool = ProgramPool(ProgramSpec(source, 60.0, 200.0, 4, [str(PACKAGES)]), tmp_path / "output.log")
    with open_stream(policy.rollout) as stream, Endpoint(stream, policy.bridge, LIMITS, SAMPLING, "policy") as endpoint:
        sessions = pool.play(endpoint, QUESTIONS)
    pool.close()
    for (row,), episode in zip(sessions, expected, strict=True):
        assert row.fault is None
        assert (row.prompt, row.tokens, row.mask) == (episode.prompt, episode.tokens, episode.mask)
        assert (row.rewards, row.stop_reason) == (episode.rewards, episode.stop_reason)
        assert row.log_probs == pytest.approx(episode.log_probs, abs=2e-6)


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
