"""Hosts of environments: arguments, results, random numbers and errors of their methods."""

import asyncio
import random
from typing import Any

import numpy
import pytest

from camshaft.agents.environment import Fault, Host, Start, Turn
from camshaft.errors import RolloutError


class HigherLower:
    def reset(self, ground_truth: str, seed: int, **row: Any) -> str:
        self.secret, self.tries, self.row, self.seed = int(ground_truth), 0, row, seed
        return "Guess a number from 1 to 9."

    def step(self, answer: str) -> tuple[str | None, float, bool]:
        self.tries += 1
        if answer.strip() == str(self.secret):
            return None, 1.0, True
        return "higher" if answer.strip() < str(self.secret) else "lower", 0.0, self.tries == 3


def turn(host: Host, number: int, answer: str) -> Turn:
    result = host.step({number: answer})[number]
    assert not isinstance(result, Fault)
    return result._replace(seconds=0)


def test_a_game_is_played() -> None:
    host = Host({"": HigherLower})
    started = host.reset({0: Start({"ground_truth": "7", "level": 2}, seed=5)})[0]
    assert not isinstance(started, Fault)
    assert started.prompt([{"role": "user", "content": "Play. "}]) == [
        {"role": "user", "content": "Play. Guess a number from 1 to 9."}
    ]
    assert turn(host, 0, "5") == Turn("higher", 0.0, False)
    assert turn(host, 0, "8").messages == [{"role": "user", "content": "lower"}]
    assert turn(host, 0, " 7") == Turn(None, 1.0, True)


def test_reset_gets_the_arguments_that_it_names() -> None:
    class Named:
        def reset(self, seed: int, row_seed: int, level: int = 1) -> str:
            return f"{seed} {row_seed} {level}"

        def step(self, answer: str) -> Any: ...

    host = Host({"": Named})
    said = [
        result.said
        for result in host.reset({0: Start({"level": 3, "other": 4}, 1, 2), 1: Start({}, 1, 3)}).values()
        if isinstance(result, Turn)
    ]
    assert said == ["1 2 3", "1 3 1"]


def test_coroutines_are_awaited() -> None:
    class Waiting:
        async def reset(self) -> None:
            await asyncio.sleep(0)

        async def step(self, answer: str) -> tuple[str, float, bool]:
            await asyncio.sleep(0)
            return answer, 2.0, True

    host = Host({"": Waiting})
    host.reset({3: Start({})})
    assert turn(host, 3, "a") == Turn("a", 2.0, True)


def test_the_column_environment_selects() -> None:
    class Other(HigherLower):
        def reset(self, **row: Any) -> str:
            return "other"

    host = Host({"a": HigherLower, "b": Other})
    started = host.reset({0: Start({"ground_truth": "1"}, name="a"), 1: Start({}, name="b")})
    assert [t.said for t in started.values() if isinstance(t, Turn)] == ["Guess a number from 1 to 9.", "other"]
    with pytest.raises(RolloutError, match="may contain a, b"):
        host.reset({2: Start({}, name="c")})


class Dice:
    def reset(self) -> None: ...
    def step(self, answer: str) -> tuple[str, float, bool]:
        return f"{random.random()} {numpy.random.random()}", 0.0, False


def test_random_numbers_depend_on_the_row_seed_only() -> None:
    def throws(numbers: list[int]) -> list[Any]:
        host = Host({"": Dice})
        host.reset({number: Start({}, row_seed=number) for number in numbers})
        return [turn(host, number, "").said for _ in range(3) for number in numbers]

    before = random.getstate()
    together = throws([1, 2])
    assert together[0::2] == throws([1])
    assert together[1::2] == throws([2])
    assert len({*together}) == 6
    assert random.getstate() == before


def test_an_environment_is_reset_again() -> None:
    built: list[Any] = []

    class Counted(HigherLower):
        def __init__(self) -> None:
            built.append(self)

    host = Host({"": Counted})
    for _ in range(3):
        host.reset({0: Start({"ground_truth": "1"})})
        host.end([0])
    assert len(built) == 1


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3, "return .text, reward, done."),
        (("a", "b", False), "finite number"),
        (("a", float("nan"), False), "finite number"),
        ((None, 0.0, False), "not done"),
        ((5, 0.0, False), "must be a text"),
        (([{"role": "user"}], 0.0, False), "must be a text"),
    ],
)
def test_wrong_results_are_explained(result: Any, message: str) -> None:
    class Wrong:
        def reset(self) -> None: ...
        def step(self, answer: str) -> Any:
            return result

    host = Host({"": Wrong})
    host.reset({0: Start({})})
    with pytest.raises(RolloutError, match=message):
        host.step({0: ""})


def test_missing_methods_are_explained() -> None:
    with pytest.raises(RolloutError, match="no method 'reset'"):
        Host({"": object}).reset({0: Start({})})
