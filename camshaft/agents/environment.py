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

Instead of `step`, an environment may have tools (`tools.py`). An answer is then a `PolicyAnswer`. Its calls are made in
the order of the text, those of coroutine functions at the same time, and their results are messages with the role tool.
An answer without calls ends the episode, and `get_reward` or the attribute `reward` is its score.
"""

import inspect
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from camshaft.agents.calls import Call, PolicyAnswer, call_id
from camshaft.agents.random_state import RandomState, Seeded
from camshaft.agents.tools import STEP, Form, error_text, form_of, text_of
from camshaft.errors import RolloutError
from camshaft.rewards.arguments import ENVIRONMENTS
from camshaft.rewards.calls import episode_outcome, failed
from camshaft.rewards.loading import RewardFunction
from camshaft.rewards.messages import Outcome, Sample
from camshaft.rewards.messages import Spec as RewardSpec

Message = dict[str, Any]
Said = str | Sequence[Message] | None


class Environment(Protocol):
    """The methods of an environment without tools, with the columns that its `reset` names."""

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
    tools: tuple[str, ...] | None = None
    """Names of the tools that the policy may call; None for all."""


class Turn(NamedTuple):
    """The reply of an environment to `reset` or an answer."""

    said: str | tuple[Message, ...] | None = None
    reward: float = 0.0
    done: bool = False
    seconds: float = 0.0
    """Duration of the call."""
    num_calls: int = 0
    """Number of calls of tools."""
    num_errors: int = 0
    """Number of these that have failed, or that cannot be read."""
    outcome: Outcome | None = None
    """Result of a reward function."""

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

    def step(self, answers: Mapping[int, str | PolicyAnswer]) -> Mapping[int, Turn | Fault]:
        """Continue episodes with answers."""
        ...

    def submit(self, calls: Mapping[int, Start | str | PolicyAnswer]) -> None:
        """Begin episodes, or continue them with answers, without waiting for the results."""
        ...

    def take(self, timeout: float) -> Mapping[int, Turn | Fault]:
        """Return the results of submitted calls that are there, after at most `timeout` seconds without one."""
        ...

    def score(self, episodes: Sequence[int]) -> Mapping[int, Turn | Fault]:
        """Read the final scores of episodes, as rewards."""
        ...

    def judge(self, samples: Mapping[int, Sample]) -> Mapping[int, list[Outcome]]:
        """Call the reward functions that take environments with episodes that have ended.

        Return the outcomes of all functions for each episode; none for an episode without such functions.
        """
        ...

    def end(self, episodes: Sequence[int]) -> None:
        """End episodes."""
        ...


def outcome_of(turn: Turn | Fault) -> Outcome:
    """Return the result of a reward function, which has failed if its call has."""
    if isinstance(turn, Fault):
        return Outcome(turn.kind, message=turn.message, trace=turn.trace)
    assert turn.outcome is not None
    return turn.outcome._replace(seconds=turn.seconds)


class Judge(NamedTuple):
    """Reward functions that are called with environments."""

    functions: Sequence[RewardFunction]
    spec: RewardSpec


class Host:
    """The environments of several episodes in this process. An exception of an environment is raised.

    Each environment has states of the global generators of Python and numpy of its own, so the numbers that it draws do
    not depend on the others.
    """

    def __init__(
        self,
        factories: Mapping[str, Callable[..., Any]],
        kwargs: Mapping[str, Any] | None = None,
        wait: Callable[[Coroutine[Any, Any, Any]], Any] | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        must_score: bool = True,
        judge: Judge | None = None,
    ):
        """Create a host.

        Args:
            factories: Classes, or functions that return an environment, by the name that `Start` selects.
            kwargs: Arguments of the factories.
            wait: Waits for the result of a coroutine. By default, a new event loop does.
            functions: Plain functions that are tools in every environment.
            must_score: If False, an environment with tools may have no score.
            judge: Reward functions with a parameter `environments`.
        """
        self._factories, self._kwargs, self._wait = factories, dict(kwargs or {}), wait or _run_coroutine
        self._functions, self._must_score, self._judge = dict(functions or {}), must_score, judge
        self._hosted: dict[int, _Hosted] = {}
        self._results: dict[int, Turn | Fault] = {}
        self._idle: dict[str, list[Any]] = {}
        """Environments whose episode has ended, by name. They are reset again."""
        self.is_async = any(map(inspect.iscoroutinefunction, self._functions.values())) or any(
            form_of(factory, bool(functions)).is_async if inspect.isclass(factory) else True
            for factory in factories.values()
        )
        """True if coroutines may have to be awaited, in an event loop."""

    def reset(self, starts: Mapping[int, Start]) -> dict[int, Turn | Fault]:
        return self._each({number: self.begin(number, start) for number, start in starts.items()})

    def step(self, answers: Mapping[int, str | PolicyAnswer]) -> dict[int, Turn | Fault]:
        return self._each({number: self.reply(number, answer) for number, answer in answers.items()})

    def submit(self, calls: Mapping[int, Start | str | PolicyAnswer]) -> None:
        """Make calls at once."""
        self._results |= self.reset({number: call for number, call in calls.items() if isinstance(call, Start)})
        self._results |= self.step({number: call for number, call in calls.items() if not isinstance(call, Start)})

    def take(self, timeout: float) -> dict[int, Turn | Fault]:
        results, self._results = self._results, {}
        return results

    def score(self, episodes: Sequence[int]) -> dict[int, Turn | Fault]:
        return self._each({number: self.read_score(number) for number in episodes})

    def judge(self, samples: Mapping[int, Sample]) -> dict[int, list[Outcome]]:
        outcomes: dict[int, list[Outcome]] = {number: [] for number in samples}
        for function in range(0 if self._judge is None else len(self._judge.functions)):
            calls = {number: self.call_reward(number, function, sample) for number, sample in samples.items()}
            for number, turn in self._each(calls).items():
                outcomes[number].append(outcome_of(turn))
        return outcomes

    def end(self, episodes: Sequence[int]) -> None:
        for number in episodes:
            if hosted := self._hosted.pop(number, None):
                self._idle.setdefault(hosted.name, []).append(hosted.environment)

    def discard(self, number: int) -> None:
        """Remove an environment that has failed."""
        self._hosted.pop(number, None)

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of one of the methods below. An event loop is used only if it is needed."""
        if self.is_async:
            return self._wait(call)
        try:
            call.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a call without coroutines has waited")

    async def begin(self, number: int, start: Start) -> Turn:
        """Begin an episode."""
        self.discard(number)
        random_state, begin = RandomState(start.row_seed), time.perf_counter()
        with random_state.active():
            name = start.name or next(iter(self._factories))
            idle = self._idle.get(name)
            environment = idle.pop() if idle else self._build(name)
            form = form_of(type(environment), bool(self._functions))
        hosted = _Hosted(name, environment, random_state, form, start.tools)
        arguments = reset_arguments(environment.reset, start)
        said = await self._call(hosted, environment.reset, arguments)
        self._hosted[number] = hosted
        return Turn(_checked_said(said, "reset"), seconds=time.perf_counter() - begin)

    async def reply(self, number: int, answer: str | PolicyAnswer) -> Turn:
        """Continue an episode with an answer."""
        hosted, begin = self._hosted[number], time.perf_counter()
        if isinstance(answer, PolicyAnswer) and answer.calls:
            turn = await self._use_tools(hosted, answer)
        elif hosted.form.has_step:
            text = answer.text if isinstance(answer, PolicyAnswer) else answer
            turn = _checked_turn(await self._call(hosted, hosted.environment.step, {}, text))
        else:
            turn = Turn(done=True)
        return turn._replace(seconds=time.perf_counter() - begin)

    async def read_score(self, number: int) -> Turn:
        """Return the final score of an episode, as the reward."""
        hosted, begin = self._hosted[number], time.perf_counter()
        environment = hosted.environment
        if callable(getattr(environment, "get_reward", None)):  # an object of the user
            value = await self._call(hosted, environment.get_reward, {})
        elif hosted.form.has_step or not (self._must_score or hasattr(environment, "reward")):
            value = 0.0
        else:
            value = await self._call(hosted, lambda: _attribute_reward(environment), {})
        return Turn(None, checked_reward(value, "the score of the environment"), True, time.perf_counter() - begin)

    async def call_reward(self, number: int, index: int, sample: Sample) -> Turn:
        """Call a reward function with the environment of an episode. An exception is its outcome."""
        assert self._judge is not None
        hosted, begin, function = self._hosted[number], time.perf_counter(), self._judge.functions[index]
        environment: Any = hosted.environment if function.arguments.batched else [hosted.environment]
        sample = sample._replace(row={**sample.row, ENVIRONMENTS: environment})  # a batch makes a list of it
        try:
            result = await self._call(hosted, lambda: function.call([sample]), {})
            outcome = episode_outcome(function, result, self._judge.spec)
        except (Exception, SystemExit) as error:
            outcome = failed(error)
        return Turn(done=True, seconds=time.perf_counter() - begin, outcome=outcome)

    async def _use_tools(self, hosted: "_Hosted", answer: PolicyAnswer) -> Turn:
        """Make the calls of an answer. Those of coroutine functions run at the same time."""
        started = [self._start_call(hosted, call) for call in answer.calls]
        waiting = [result for result in started if not isinstance(result, _Result)]
        if len(waiting) > 1:
            import asyncio

            waited = iter(await asyncio.gather(*waiting))
        else:
            waited = iter([await result for result in waiting])
        results = [result if isinstance(result, _Result) else next(waited) for result in started]
        messages = tuple(
            {"role": "tool", "name": call.name, "tool_call_id": call_id(answer.turn, i), "content": result.content}
            for i, (call, result) in enumerate(zip(answer.calls, results, strict=True))
        )
        return Turn(messages, num_calls=len(results), num_errors=sum(result.is_error for result in results))

    def _start_call(self, hosted: "_Hosted", call: Call) -> "_Result | Awaitable[_Result]":
        """Call a tool, and return its result, or an awaitable of it."""
        if call.error is not None:
            return _Result(error_text(call.error), True)
        names = [*self._functions, *hosted.form.tools]
        names = [name for name in names if hosted.tools is None or name in hosted.tools]
        if call.name not in names:
            return _Result(error_text(f"there is no tool '{call.name}'; the tools are {', '.join(names)}"), True)
        tool: Any = self._functions.get(call.name) or getattr(hosted.environment, call.name)
        try:
            with hosted.random_state.active():
                value = tool(**call.arguments)
                if inspect.isawaitable(value) and not self.is_async:
                    value = self._wait(_awaited(value))
        except Exception as error:
            return _Result(error_text(error), True)
        return self._end_call(hosted, value) if inspect.isawaitable(value) else _Result(text_of(value))

    async def _end_call(self, hosted: "_Hosted", value: Awaitable[Any]) -> "_Result":
        try:
            return _Result(text_of(await Seeded(value, hosted.random_state)))
        except SystemExit as error:  # which would end the event loop
            raise RolloutError(f"a tool has raised SystemExit: {error}") from error
        except Exception as error:
            return _Result(error_text(error), True)

    async def _call(self, hosted: "_Hosted", method: Callable[..., Any], arguments: dict[str, Any], *texts: str) -> Any:
        """Call a method of an environment with its random state."""
        with hosted.random_state.active():
            value = method(*texts, **arguments)
            if inspect.isawaitable(value) and not self.is_async:
                value = self._wait(_awaited(value))
        return await Seeded(value, hosted.random_state) if inspect.isawaitable(value) else value

    def _each(self, calls: Mapping[int, Coroutine[Any, Any, Turn]]) -> dict[int, Turn | Fault]:
        """Make calls of several episodes; at the same time, if they are coroutines."""
        if not self.is_async:
            return {number: self.run(call) for number, call in calls.items()}

        async def gather() -> list[Turn]:
            import asyncio

            return await asyncio.gather(*calls.values())

        return dict(zip(calls, self._wait(gather()), strict=True))

    def _build(self, name: str) -> Any:
        if name not in self._factories:
            choices = ", ".join(sorted(self._factories))
            raise RolloutError(f"there is no environment '{name}'; the column 'environment' may contain {choices}")
        return self._factories[name](**self._kwargs)


class _Hosted(NamedTuple):
    name: str
    environment: Any
    random_state: "RandomState"
    form: Form
    tools: tuple[str, ...] | None


class _Result(NamedTuple):
    """Result of a call of a tool."""

    content: Any
    is_error: bool = False


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
        raise RolloutError(f"{STEP} of the environment returned {_shorten(result)}; return (text, reward, done)")
    said, reward, done = result
    number = checked_reward(reward, f"the reward of {STEP} of the environment")
    said = _checked_said(said, STEP)
    if said is None and not done:
        raise RolloutError("step of the environment says nothing (None), but the episode is not done; return a text")
    return Turn(said, number, bool(done))


def checked_reward(reward: Any, subject: str) -> float:
    """Return a reward as a number. Raise RolloutError if it is a text, another object, NaN or infinite."""
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RolloutError(f"{subject} is {_shorten(reward)}; return a finite number")
    return number


def _attribute_reward(environment: Any) -> Any:
    if not hasattr(environment, "reward"):
        raise RolloutError(
            f"the environment {type(environment).__name__} has no score; define get_reward, or set its attribute "
            "'reward', or configure a reward function"
        )
    return environment.reward


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _run_coroutine(value: Coroutine[Any, Any, Any]) -> Any:
    import asyncio

    return asyncio.run(value)
