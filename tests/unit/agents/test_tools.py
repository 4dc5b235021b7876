"""Tools of environments and plain functions: schemas, results, errors, scores, and calls at the same time."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pages import blocks
from transformers.utils.chat_template_utils import get_json_schema

from camshaft.agents.calls import Call, Parsed, PolicyAnswer
from camshaft.agents.environment import Fault, Host, Start, Turn
from camshaft.agents.messages import Source, Spec
from camshaft.agents.pool import EnvironmentPool
from camshaft.agents.tools import form_of, schemas_of
from camshaft.errors import RolloutError


class Counter:
    def reset(self, **row: Any) -> str:
        self.reward, self.running, self.peak = 0.0, 0, 0
        return "Count."

    def add(self, number: int) -> int:
        """Add to the counter.

        Args:
            number: what to add
        """
        if number < 0:
            raise ValueError("x" * 1000)
        self.reward += number
        return int(self.reward)

    async def later(self, word: str) -> str:
        """Wait, and return a word.

        Args:
            word: the word
        """
        self.running += 1
        self.peak = max(self.peak, self.running)
        await asyncio.sleep(0.05)
        self.running -= 1
        return f"{word} {self.peak}"


def double(number: int) -> int:
    """Double a number.

    Args:
        number: the number
    """
    return 2 * number


def answer(*calls: Call) -> PolicyAnswer:
    return PolicyAnswer("", calls)


def host(kind: Any = Counter, **options: Any) -> Host:
    made = Host({"": kind}, **options)
    made.reset({0: Start({}, row_seed=3)})
    return made


def contents(turn: Turn | Fault) -> list[Any]:
    assert isinstance(turn, Turn)
    return [message["content"] for message in turn.messages]


def test_public_methods_are_tools_with_the_schemas_of_transformers() -> None:
    form = form_of(Counter)
    assert form.tools == ("add", "later")
    expected = [get_json_schema(method) for method in (double, Counter().add, Counter().later)]
    assert list(schemas_of(Counter, form, {"double": double})) == expected


def test_results_are_messages_in_the_order_of_the_calls() -> None:
    calls = [Call("later", {"word": "a"}), Call("add", {"number": 2}), Call("later", {"word": "b"})]
    (turn,) = host().step({0: answer(*calls)}).values()
    assert contents(turn) == ["a 2", "2", "b 2"]  # two coroutines have run at the same time
    assert isinstance(turn, Turn)
    assert [message["name"] for message in turn.messages] == ["later", "add", "later"]
    assert (turn.num_calls, turn.num_errors, turn.done) == (3, 0, False)


def test_failed_calls_are_told_to_the_policy() -> None:
    calls = (Call("add", {"number": -1}), Call("add", {"n": 1}), Call("subtract", {}), Call("", {}, "no JSON"))
    (turn,) = host().step({0: answer(*calls)}).values()
    first, second, third, fourth = contents(turn)
    assert first.startswith("error: ValueError: xxx")
    assert len(first) < 520
    assert "unexpected keyword argument 'n'" in second
    assert third == "error: there is no tool 'subtract'; the tools are add, later"
    assert fourth == "error: no JSON"
    assert isinstance(turn, Turn)
    assert (turn.num_calls, turn.num_errors) == (4, 4)


def test_an_answer_without_calls_ends_the_episode_with_its_score() -> None:
    played = host()
    played.step({0: answer(Call("add", {"number": 2}))})
    (turn,) = played.step({0: PolicyAnswer("done")}).values()
    (score,) = played.score([0]).values()
    assert isinstance(turn, Turn)
    assert isinstance(score, Turn)
    assert (turn.done, turn.reward, score.reward) == (True, 0.0, 2.0)


def test_get_reward_is_the_score() -> None:
    class Owner(Counter):
        async def get_reward(self) -> float:
            return self.reward / 4

    played = host(Owner)
    played.step({0: answer(Call("add", {"number": 2}))})
    assert [turn.reward for turn in played.score([0]).values() if isinstance(turn, Turn)] == [0.5]


def test_a_property_is_the_score() -> None:
    class Owner(Counter):
        reward = property(lambda self: 7)

        def reset(self, **row: Any) -> None: ...

    assert [turn.reward for turn in host(Owner).score([0]).values() if isinstance(turn, Turn)] == [7.0]


def test_a_missing_score_is_an_error() -> None:
    class Unscored:
        def reset(self) -> None: ...
        def look(self) -> str:
            """Look."""
            return "a box"

    with pytest.raises(RolloutError, match="define get_reward, or set its attribute 'reward'"):
        host(Unscored).score([0])
    assert host(Unscored, must_score=False).score([0])


def test_functions_are_tools_beside_step() -> None:
    class Talk:
        def reset(self) -> None: ...
        def step(self, answer: str) -> tuple[str, float, bool]:
            return f"You said {answer}.", 1.0, False

    played = host(Talk, functions={"double": double})
    assert contents(played.step({0: answer(Call("double", {"number": 4}))})[0]) == ["8"]
    assert contents(played.step({0: PolicyAnswer("eight")})[0]) == ["You said eight."]


def test_a_row_chooses_its_tools() -> None:
    played = Host({"": Counter}, functions={"double": double})
    played.reset({0: Start({}, tools=("double",))})
    (turn,) = played.step({0: answer(Call("double", {"number": 4}), Call("add", {"number": 1}))}).values()
    assert contents(turn) == ["8", "error: there is no tool 'add'; the tools are double"]


class Both(Counter):
    def step(self, answer: str) -> tuple[None, float, bool]:
        return None, 0.0, True


def test_step_beside_tools_needs_a_decision() -> None:
    with pytest.raises(RolloutError, match=r"tool_methods = \['add', 'later'\]"):
        form_of(Both)
    chosen = form_of(type("Chosen", (Both,), {"tool_methods": ["add"]}))
    assert (chosen.tools, chosen.has_step) == (("add",), True)
    assert form_of(type("Turns", (Both,), {"tool_methods": []})).tools == ()
    with pytest.raises(RolloutError, match="no method 'ad'"):
        form_of(type("Wrong", (Both,), {"tool_methods": ["ad"]}))


@pytest.mark.parametrize(
    ("docstring", "hint", "missing"),
    [
        (None, int, "no docstring"),
        ("Add.", int, "no description for the argument 'number'"),
        ("Add.\n\nArgs:\n    number: what", None, "number is missing a type hint"),
    ],
)
def test_a_bad_docstring_names_the_method_and_what_is_missing(docstring: Any, hint: Any, missing: str) -> None:
    def add(self: Any, number: Any) -> None: ...

    add.__doc__ = docstring
    add.__annotations__ = {"number": hint} if hint else {}
    kind = type("Bad", (), {"reset": lambda self: None, "add": add})
    with pytest.raises(RolloutError, match=rf"the method Bad\.add cannot be a tool: .*{missing}"):
        schemas_of(kind, form_of(kind), {})


PROGRAM = """
import asyncio, os, time, random

RUNNING = []

class Slow:
    def reset(self, fault=None):
        self.fault, self.reward = fault, 0.0

    async def work(self, number: int) -> str:
        '''Work.

        Args:
            number: any
        '''
        RUNNING.append(number)
        open("LOG", "a").write(f"{len(RUNNING)} ")
        await asyncio.sleep(0.1)
        RUNNING.pop()
        if self.fault and number == 1:
            FAULT
        self.reward += 1
        return f"{number} {random.random()}"
"""
FAULTS = {
    "await": ("await asyncio.sleep(600)", "timeout"),
    "block": ("time.sleep(600)", "timeout"),
    "kill": ("os._exit(3)", "crash"),
    "exit": ("raise SystemExit(3)", "error"),
}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Any]:
    pools: list[EnvironmentPool] = []

    def make(fault: str) -> EnvironmentPool:
        file = tmp_path / f"slow{len(pools)}.py"
        file.write_text(PROGRAM.replace("FAULT", fault).replace("LOG", str(tmp_path / "running")))
        spec = Spec((Source("Slow", f"{file}:Slow"),), {}, 2.0, 120.0, [])
        spec = spec._replace(concurrent=("Slow",), scored=("Slow",), is_described=True)
        pools.append(EnvironmentPool(spec, 1, tmp_path / "output.log"))
        return pools[-1]

    yield make
    for each in pools:
        each.close()


def work(pool: EnvironmentPool) -> dict[int, list[Any]]:
    """Make two calls in each of four episodes of one process, of which one may have a fault."""
    starts = {number: Start({"fault": number == 1}, row_seed=number) for number in range(4)}
    turns: dict[int, list[Any]] = {number: [turn] for number, turn in pool.reset(starts).items()}
    for step in (0, 1):
        for number, turn in pool.step({number: answer(Call("work", {"number": step})) for number in starts}).items():
            turns[number].append(turn)
    scored = [number for number, results in turns.items() if isinstance(results[-1], Turn)]
    for number, turn in pool.score(scored).items():
        turns[number].append(turn)
    pool.end(list(turns))
    return {number: [_untimed(turn) for turn in results] for number, results in turns.items()}


def _untimed(turn: Turn | Fault) -> Turn | Fault:
    return turn._replace(seconds=0) if isinstance(turn, Turn) else turn


@pytest.mark.parametrize("fault", FAULTS)
def test_coroutines_of_episodes_run_together_and_fail_alone(pool: Any, fault: str, tmp_path: Path) -> None:
    expected = work(pool("pass"))
    assert max(map(int, (tmp_path / "running").read_text().split())) == 4
    turns = work(pool(FAULTS[fault][0]))
    assert {n: turns[n] for n in (0, 2, 3)} == {n: expected[n] for n in (0, 2, 3)}
    assert turns[1][:-1] == expected[1][:2]
    assert isinstance(turns[1][-1], Fault)
    assert turns[1][-1].kind == FAULTS[fault][1]
    assert expected[0][-1].reward == 2.0


def page_file(name: str) -> dict[str, Any]:
    """Run a file of the page about environments, and return its names."""
    (text,) = (block.text for block in blocks("docs/agents.md") if block.text.startswith(f"# {name}\n"))
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def test_the_calculator_of_the_page_is_played() -> None:
    played = Host({"": page_file("calculator.py")["Calculator"]})
    played.reset({0: Start({"ground_truth": "12"})})
    assert contents(played.step({0: answer(Call("multiply", {"a": 3, "b": 4}))})[0]) == ["12"]
    assert [turn.reward for turn in played.score([0]).values() if isinstance(turn, Turn)] == [1.0]
    parse = page_file("shout.py")["parse"]
    assert parse("Now CALL look") == Parsed("Now ", (Call("look", {}),))
