"""Programs that own the conversation, and the messages between a program pool and the process that starts them.

    async def solve(base_url, api_key, ground_truth, **row):       # columns of the data file by name, and seeds
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        answer = await client.chat.completions.create(model="policy", messages=row["prompt"])
        return float(answer.choices[0].message.content == ground_truth)

    python agent.py --url {base_url}                               # or a command, which reads the row as JSON

The setup of the process is a `ProgramSpec`, which it answers with a `Loaded`. The payload of a request is a `Job` or a
`Stop`, and the value of the reply is an `Outcome`. The process imports this module, which needs only the standard
library.
"""

import contextlib
import inspect
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from camshaft.agents.environment import Fault, Start, checked_reward, reset_arguments
from camshaft.agents.messages import Source, read_columns
from camshaft.errors import CamshaftError
from camshaft.plugins import find_in_file, function_file, import_attribute, is_function

KEPT_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
"""Environment variables of the run that a program gets, beside those whose names begin with LC_."""
URL_VARIABLE, KEY_VARIABLE = "OPENAI_BASE_URL", "OPENAI_API_KEY"
"""Environment variables of a program with its URL and its key, which clients read."""

_GIVEN = ("base_url", "api_key", "seed", "row_seed")


class ProgramSpec(NamedTuple):
    """A program to start, with its settings."""

    source: Source
    """A function, or a command line as the target."""
    timeout: float
    """Time limit of the program between two requests, in seconds."""
    start_timeout: float
    """Time limit of loading, and of the program up to its first request, in seconds."""
    max_concurrency: int
    """Maximum number of programs that run at the same time on a rank."""
    sys_path: list[str]
    """Module search path of the driver, which is appended to that of the process."""

    @property
    def reader(self) -> str:
        """Reader of the columns of the data file, for errors."""
        return f"the program {self.source.target}"

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.source,)

    @property
    def schemas(self) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """JSON schemas of tools: none, because a program sends its own."""
        return {}

    @property
    def scored(self) -> tuple[str, ...]:
        """Names of environments with a final score: none, because a program returns its score."""
        return ()


class Job(NamedTuple):
    """A program to run for an episode."""

    number: int
    base_url: str
    api_key: str
    start: bytes
    """Pickled `Start` of the episode."""


class Stop(NamedTuple):
    """A request to kill the program of an episode."""

    number: int


class Outcome(NamedTuple):
    """End of a program."""

    reward: float | None = None
    fault: Fault | None = None


class Program(NamedTuple):
    """A loaded program: a function, or a command."""

    function: Callable[..., Any] | None
    command: tuple[str, ...] = ()

    def arguments(self, job: Job, start: Start) -> dict[str, Any]:
        """Return the arguments of the function for an episode."""
        assert self.function is not None
        row = {**start.row, "base_url": job.base_url, "api_key": job.api_key}
        return reset_arguments(self.function, start._replace(row=row))

    def command_line(self, job: Job) -> list[str]:
        """Return the command for an episode."""
        values = {"{base_url}": job.base_url, "{api_key}": job.api_key}
        parts = list(self.command)
        for name, value in values.items():
            parts = [part.replace(name, value) for part in parts]
        return parts

    def columns(self) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """Return the columns of the data file that the program reads, or None for all, and those that it requires."""
        if self.function is None:
            return None, ()
        return read_columns([list(inspect.signature(self.function).parameters.values())], _GIVEN)


def load_program(source: Source, unpickle: Callable[[bytes], Any]) -> Program:
    """Load a function or a command. Raise CamshaftError on failure."""
    if source.pickled is not None:
        function = unpickle(source.pickled)
    elif not is_function(source.target):
        return Program(None, _checked_command(source.target))
    elif path := function_file(source.target):
        function = find_in_file(path, source.target[len(path) + 1 :], "program", "agent")
    else:
        function = import_attribute(source.target)
    if not callable(function):
        raise CamshaftError(f"{source.target} has type {type(function).__name__}; a program is a function")
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters}
    if not any(p.kind == p.VAR_KEYWORD for p in parameters) and not {"base_url", "api_key"} & names:
        raise CamshaftError(
            f"the program {source.target} has no parameter base_url; define solve(base_url, api_key, **row)"
        )
    return Program(function)


def _checked_command(target: str) -> tuple[str, ...]:
    try:
        command = tuple(shlex.split(target))
    except ValueError as error:
        raise CamshaftError(f"agent={target!r} is no command line: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise CamshaftError(
            f"agent={target!r}: there is no program {command[0] if command else ''!r}. Set agent=file.py:function, "
            "package.module:function, or a command line whose program is on the PATH"
        )
    return command


def kept_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a program gets, without its URL and key."""
    return {name: value for name, value in environment.items() if name in KEPT_VARIABLES or name.startswith("LC_")}


def row_json(start: Start) -> str:
    """Return the row of an episode as JSON, with its seeds."""
    return json.dumps({**start.row, "seed": start.seed, "row_seed": start.row_seed}, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)  # arrays of numpy and torch


def checked_result(value: Any) -> float | None:
    """Return the result of a program as its reward, or None if it has none. Raise RolloutError for other objects."""
    return None if value is None else checked_reward(value, "the result of the program")


def last_reward(output: bytes) -> float | None:
    """Return the reward in the last line of JSON that a command has printed: a number, or an object with `reward`."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, int | float):
                return checked_result(value)
            if isinstance(value, dict) and "reward" in value:
                return checked_result(value["reward"])
    return None
