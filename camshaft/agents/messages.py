"""Contents of the messages between an environment pool and its processes, and the loading of environments.

The setup of a process is a `Spec`, which it answers with a `Loaded`. The payload of a request is a `Call`, and the
value of the reply is a list of `Turn` and `Fault`. Every process imports this module, so it uses only the standard
library.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from camshaft.agents.calls import PolicyAnswer
from camshaft.agents.tools import NoEnvironment, form_of, schemas_of
from camshaft.errors import CamshaftError, RolloutError
from camshaft.plugins import find_in_file, find_target, import_attribute
from camshaft.rewards.messages import Spec as RewardSpec
from camshaft.subprocesses import import_path

if TYPE_CHECKING:
    from camshaft.config.schema.agents import MultiTurnConfig

GROUP = "camshaft.environments"
"""Group of the entry points of environments."""


class Scoring(NamedTuple):
    """A call of a reward function with the environment of an episode."""

    function: int
    """Index in the functions of `Spec.rewards`."""
    sample: bytes
    """Pickled `Sample`."""


Reply = str | PolicyAnswer | Scoring | None
"""What an environment receives: an answer, None to read its score, or a call of a reward function."""


class Source(NamedTuple):
    """The origin of an environment."""

    name: str
    """Name by which the column `environment` selects it."""
    target: str
    """`file.py:Class`, `file.py`, `package.module:Class`, or the name of an entry point; or the name of `pickled`."""
    pickled: bytes | None = None
    """The class itself, if it was passed from Python."""
    checksum: str = ""
    """Checksum of the code of `pickled`."""
    is_tool: bool = False
    """True for a plain function that is a tool."""


class Spec(NamedTuple):
    """Environments to load, with their settings."""

    sources: tuple[Source, ...]
    kwargs: dict[str, Any]
    """Arguments of their constructors."""
    timeout: float
    """Time limit of a call of `step`, in seconds."""
    start_timeout: float
    """Time limit of construction and `reset`, and of loading, in seconds."""
    sys_path: list[str]
    """Module search path of the driver, which is appended to that of the process."""
    functions: tuple[Source, ...] = ()
    """Plain functions that are tools in every environment."""
    is_scored_elsewhere: bool = False
    """True if an environment with tools may have no score, because the run has other rewards."""
    schemas: Mapping[str, tuple[dict[str, Any], ...]] = {}
    """JSON schemas of the tools of each environment, by name."""
    concurrent: tuple[str, ...] = ()
    """Names of the environments with coroutine functions."""
    scored: tuple[str, ...] = ()
    """Names of the environments with a final score."""
    is_described: bool = False
    """True if the previous three are known."""
    rewards: RewardSpec | None = None
    """Reward functions that are called with an environment."""

    @property
    def reader(self) -> str:
        """Reader of the columns of the data file, for errors."""
        return f"reset of the environment {self.sources[0].target}"

    def limit(self, reply: "Reply") -> float:
        """Return the time limit of the calls of user code that a reply needs, in seconds."""
        if isinstance(reply, Scoring):
            assert self.rewards is not None
            return self.rewards.timeout
        return self.timeout * (max(1, len(reply.calls)) if isinstance(reply, PolicyAnswer) else 1)

    def described(self, loaded: "Loaded") -> "Spec":
        """Return the spec with what loading has found."""
        return self._replace(
            schemas=loaded.schemas, concurrent=loaded.concurrent, scored=loaded.scored, is_described=True
        )


class Loaded(NamedTuple):
    """Result of loading the environments. `error` is None on success."""

    error: str | None
    columns: tuple[str, ...] | None = ()
    """Columns of the data file that `reset` reads; None for all columns."""
    required: tuple[str, ...] = ()
    """Columns without which `reset` cannot be called."""
    schemas: Mapping[str, tuple[dict[str, Any], ...]] = {}
    concurrent: tuple[str, ...] = ()
    scored: tuple[str, ...] = ()


class Call(NamedTuple):
    """Calls of one environment, in order."""

    episode: int
    start: bytes | None
    """Pickled `Start` of a new episode; None continues the episode."""
    answers: tuple[Reply, ...]


def make_spec(section: "MultiTurnConfig", passed: Sequence[Source], has_other_rewards: bool = False) -> Spec:
    """Return the environments and tools of a section. `passed` are those from Python, which replace them.

    With `has_other_rewards`, an environment with tools may have no score.
    """
    sources = tuple(source for source in passed if not source.is_tool)
    sources = sources or tuple(Source(name, target) for name, target in section.selected())
    functions = tuple(source for source in passed if source.is_tool)
    functions = functions or tuple(Source(name, target, is_tool=True) for name, target in section.selected_tools())
    names = [source.name for source in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise RolloutError(
            f"two environments have the name {twice[0]}, which the column 'environment' selects; rename one"
        )
    files = [source.target.rpartition(":")[0] or source.target for source in (*sources, *functions)]
    folders = [str(Path(file).resolve().parent) for file in files]
    path = [*dict.fromkeys(folders), *import_path()]  # a file can import modules beside it
    limits = section.timeout, section.start_timeout
    kwargs = section.environment_kwargs if sources else {}
    return Spec(sources, kwargs, *limits, path, functions, has_other_rewards)


Functions = dict[str, Callable[..., Any]]


def load_environments(spec: Spec, unpickle: Callable[[bytes], Any]) -> tuple[Functions, Functions]:
    """Load the classes and the functions of `spec`, by name. Raise CamshaftError on failure."""
    functions = {source.name: _load(source, unpickle) for source in spec.functions}
    factories = {source.name: _load(source, unpickle) for source in spec.sources}
    for source in spec.sources:
        _check_arguments(source.target, factories[source.name], spec.kwargs)
        factory: Any = factories[source.name]
        if inspect.isclass(factory):
            form_of(factory, bool(functions))
    return factories or {"": NoEnvironment}, functions


def describe(factories: Functions, functions: Functions, kwargs: Mapping[str, Any]) -> Loaded:
    """Return the columns and the tools of environments. A function that makes environments is called once."""
    kinds: dict[str, Any] = {
        name: factory if inspect.isclass(factory) else type(factory(**kwargs)) for name, factory in factories.items()
    }
    forms = {name: form_of(kind, bool(functions)) for name, kind in kinds.items()}
    has_async_tool = any(map(inspect.iscoroutinefunction, functions.values()))
    return Loaded(
        None,
        *read_columns([list(inspect.signature(kind.reset).parameters.values())[1:] for kind in kinds.values()]),
        {name: schemas_of(kinds[name], form, functions) for name, form in forms.items()},
        tuple(name for name, form in forms.items() if form.is_async or has_async_tool),
        tuple(name for name, form in forms.items() if form.is_scored and kinds[name] is not NoEnvironment),
    )


def _check_arguments(target: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        raise CamshaftError(
            f"the environment {target} cannot be constructed: {error}. Its arguments are multi_turn.environment_kwargs"
        ) from error
    except ValueError:  # a class of an extension module, without a signature
        return


def _load(source: Source, unpickle: Callable[[bytes], Any]) -> Callable[..., Any]:
    if source.pickled is not None:
        loaded = unpickle(source.pickled)
    else:
        path, _, name = source.target.rpartition(":") if ".py:" in source.target else (source.target, "", "")
        if path.endswith(".py") and source.is_tool:
            loaded = find_in_file(path, name, "tool", "tools")
        elif path.endswith(".py"):
            loaded = find_in_file(path, name, "environment", "environment", _environments_of)
        else:
            target = find_target(source.target, {}, GROUP)
            if target is None:
                raise CamshaftError(
                    f"no environment '{source.target}'; set environment=file.py:Class, package.module:Class, or an "
                    f"entry point of the group {GROUP}"
                )
            loaded = import_attribute(target)
    if not callable(loaded):
        kind = "a tool is a function" if source.is_tool else "an environment is a class"
        raise CamshaftError(f"{source.target} has type {type(loaded).__name__}; {kind}")
    return loaded


def _environments_of(module: ModuleType) -> dict[str, type]:
    """Return the classes with `reset` that a module defines itself, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "reset")
    }


def read_columns(
    functions: Sequence[Sequence[inspect.Parameter]], given: Sequence[str] = ("seed", "row_seed")
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return the columns of the data file that functions read, or None for all, and those that a single one requires.

    `functions` are their parameters, and `given` the names of parameters that are no columns.
    """
    parameters = [parameter for each in functions for parameter in each]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in given]
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    required = tuple(p.name for p in named if p.default is p.empty) if len(functions) == 1 else ()
    return None if takes_all else tuple(dict.fromkeys(p.name for p in named)), required
