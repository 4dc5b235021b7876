"""Environments: any objects with the methods `reset` and `step`.

    class HigherLower:
        def reset(self, ground_truth, seed):            # columns of the data file by name, and seeds
            self.secret, self.tries = int(ground_truth), 0
            return "Guess a number from 1 to 9."        # appended to the last user message; None appends nothing

        def step(self, answer):                         # text of an answer
            self.tries += 1
            if answer.strip() == str(self.secret):
                return None, 1.0, True                  # what the environment says, reward, and True at the end
            return "higher" if answer.strip() < str(self.secret) else "lower", 0.0, self.tries == 3

    host = Host({"": HigherLower})
    host.reset({0: Start({"ground_truth": "7"}, seed=1, row_seed=1)})     # {0: Turn(...)}
    host.step({0: "5"})                                                   # {0: Turn((message,), 0.0, False)}

There is nothing to inherit from. Methods may be coroutine functions. An object serves one episode at a time, and
`reset` may be called again. What `step` says is a text, which becomes a user message, or a list of messages.
"""

import contextlib
import inspect
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from camshaft.errors import RolloutError

Message = dict[str, Any]
Said = str | Sequence[Message] | None


class Environment(Protocol):
    """The methods of an environment, with the columns that its `reset` names."""

    def reset(self, *args: Any, **row: Any) -> Any: ...
    def step(self, answer: str, /) -> Any: ...


class Start(NamedTuple):
    """Arguments with which an episode begins."""

    row: Mapping[str, Any]
    """Columns of the data file."""
    seed: int = 0
    """Seed of the prompt, equal for all episodes that are compared with each other."""
    row_seed: int = 0
    """Seed of the episode, with which the global generators of Python and numpy are seeded."""
    name: str = ""
    """Name of the environment; empty for the first one."""


class Turn(NamedTuple):
    """The reply of an environment to `reset` or an answer."""

    said: str | tuple[Message, ...] | None = None
    reward: float = 0.0
    done: bool = False
    seconds: float = 0.0
    """Duration of the call."""

    @property
    def messages(self) -> list[Message]:
        """The messages that follow an answer."""
        return [{"role": "user", "content": self.said}] if isinstance(self.said, str) else [*(self.said or ())]

    def prompt(self, messages: Sequence[Message]) -> list[Message]:
        """Return the prompt of an episode: `messages` with what `reset` has said."""
        if not isinstance(self.said, str):
            return [*messages, *(self.said or ())]
        if not messages or messages[-1].get("role") != "user":
            return [*messages, *self.messages]
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{self.said}"}]


class Fault(NamedTuple):
    """Failure of a call."""

    kind: Literal["error", "timeout", "crash"]
    message: str
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}\n{self.trace}".rstrip()


class Environments(Protocol):
    """The environments of several episodes, which are known by numbers."""

    def reset(self, starts: Mapping[int, Start]) -> Mapping[int, Turn | Fault]:
        """Begin episodes."""
        ...

    def step(self, answers: Mapping[int, str]) -> Mapping[int, Turn | Fault]:
        """Continue episodes with answers."""
        ...

    def end(self, episodes: Sequence[int]) -> None:
        """End episodes."""
        ...


class Host:
    """The environments of several episodes in this process. An exception of an environment is raised.

    Each environment has states of the global generators of Python and numpy of its own, so the numbers that it draws do
    not depend on the others. Those that a coroutine draws after its first `await` do.
    """

    def __init__(
        self,
        factories: Mapping[str, Callable[..., Any]],
        kwargs: Mapping[str, Any] | None = None,
        wait: Callable[[Any], Any] | None = None,
    ):
        """Create a host.

        Args:
            factories: Classes, or functions that return an environment, by the name that `Start` selects.
            kwargs: Arguments of the factories.
            wait: Waits for the result of a coroutine. By default, a new event loop does.
        """
        self._factories, self._kwargs, self._wait = factories, dict(kwargs or {}), wait or _run_coroutine
        self._hosted: dict[int, _Hosted] = {}
        self._idle: dict[str, list[Any]] = {}
        """Environments whose episode has ended, by name. They are reset again."""

    def reset(self, starts: Mapping[int, Start]) -> dict[int, Turn | Fault]:
        turns: dict[int, Turn | Fault] = {}
        for number, start in starts.items():
            self.discard(number)
            random_state, begin = _RandomState(start.row_seed), time.perf_counter()
            with random_state.active():
                name = start.name or next(iter(self._factories))
                idle = self._idle.get(name)
                environment = idle.pop() if idle else self._build(name)
                arguments = reset_arguments(environment.reset, start)
                said = self._result(environment.reset(**arguments))
            self._hosted[number] = _Hosted(name, environment, random_state)
            turns[number] = Turn(_checked_said(said, "reset"), seconds=time.perf_counter() - begin)
        return turns

    def step(self, answers: Mapping[int, str]) -> dict[int, Turn | Fault]:
        turns: dict[int, Turn | Fault] = {}
        for number, answer in answers.items():
            hosted, begin = self._hosted[number], time.perf_counter()
            with hosted.random_state.active():
                result = self._result(hosted.environment.step(answer))
            turns[number] = _checked_turn(result)._replace(seconds=time.perf_counter() - begin)
        return turns

    def end(self, episodes: Sequence[int]) -> None:
        for number in episodes:
            if hosted := self._hosted.pop(number, None):
                self._idle.setdefault(hosted.name, []).append(hosted.environment)

    def discard(self, number: int) -> None:
        """Remove an environment that has failed."""
        self._hosted.pop(number, None)

    def _build(self, name: str) -> Any:
        if name not in self._factories:
            choices = ", ".join(sorted(self._factories))
            raise RolloutError(f"there is no environment '{name}'; the column 'environment' may contain {choices}")
        environment = self._factories[name](**self._kwargs)
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):  # an object of the user
                raise RolloutError(
                    f"the environment {type(environment).__name__} has no method '{method}'; define reset and step"
                )
        return environment

    def _result(self, value: Any) -> Any:
        return self._wait(value) if inspect.isawaitable(value) else value


class _Hosted(NamedTuple):
    name: str
    environment: Any
    random_state: "_RandomState"


class _RandomState:
    """The states of the global generators of Python and numpy for one environment."""

    def __init__(self, seed: int):
        self._seed = seed
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Use these states inside the block, and restore those of the process afterwards."""
        python, numpy = random.getstate(), sys.modules.get("numpy")
        outer = None if numpy is None else numpy.random.get_state()
        random.setstate(self._python)
        if numpy is not None:
            self._set_numpy(numpy)
        try:
            yield
        finally:
            self._python = random.getstate()
            random.setstate(python)
            if numpy is not None:  # an environment that imports numpy in a call gets its own state in the next one
                self._numpy = numpy.random.get_state()
                numpy.random.set_state(outer)

    def _set_numpy(self, numpy: Any) -> None:
        if self._numpy is None:
            numpy.random.seed(self._seed % 2**32)
        else:
            numpy.random.set_state(self._numpy)


def reset_arguments(reset: Callable[..., Any], start: Start) -> dict[str, Any]:
    """Return the arguments of `reset`: the seeds that it names, and the columns that it names, or all with `**row`."""
    parameters = inspect.signature(reset).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    seeds = {name: value for name, value in (("seed", start.seed), ("row_seed", start.row_seed)) if name in names}
    return {name: value for name, value in start.row.items() if takes_all or name in names} | seeds


def _checked_said(said: Any, method: str) -> str | tuple[Message, ...] | None:
    """Validate what a method of an environment says."""
    if said is None or isinstance(said, str):
        return said
    messages = tuple(said) if isinstance(said, Sequence) else ()
    if messages and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in messages):
        return tuple(dict(message) for message in messages)
    raise RolloutError(
        f"{method} of the environment says {_shorten(said)}; it must be a text, a list of messages with role and "
        "content, or None"
    )


def _checked_turn(result: Any) -> Turn:
    """Validate the result of `step`."""
    if not isinstance(result, tuple) or len(result) != 3:
        raise RolloutError(f"step of the environment returned {_shorten(result)}; return (text, reward, done)")
    said, reward, done = result
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RolloutError(f"step of the environment returned the reward {_shorten(reward)}; return a finite number")
    said = _checked_said(said, "step")
    if said is None and not done:
        raise RolloutError("step of the environment says nothing (None), but the episode is not done; return a text")
    return Turn(said, number, bool(done))


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _run_coroutine(value: Any) -> Any:
    import asyncio

    async def result() -> Any:
        return await value

    return asyncio.run(result())
