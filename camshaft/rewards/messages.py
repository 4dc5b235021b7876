"""Messages between the reward pool and its workers.

To a worker: one `Spec`, then lists of calls. A call is a list of pickled `Sample`s: one sample, or a batch for batched
functions. From a worker: `Loaded`, then one `Answer` per call, in order. Each sample is pickled separately, so that a
sample that cannot be unpickled fails without affecting others. Both ends belong to camshaft and run as the same user,
so pickle adds no risk beyond the reward function itself. Only the standard library is imported, because each worker
imports this module.
"""

from typing import Any, NamedTuple


class Spec(NamedTuple):
    """Reward function to load, with its settings."""

    path: str | None
    """A .py file or a module; None: `name` is a built-in, an entry point or `module:function`."""
    name: str
    kwargs: dict[str, Any]
    timeout: float
    sys_path: list[str]
    """Module search path of the driver, added to that of the worker."""
    batched: bool | None = None
    """True if the function takes lists of samples; None: detect from its parameter names."""


class Sample(NamedTuple):
    """The arguments of one call."""

    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: Any


class Loaded(NamedTuple):
    """Result of loading the function; `problem` is the error, or None."""

    problem: str | None
    batched: bool = False


class Reply(NamedTuple):
    """Result of one sample."""

    kind: str
    """`ok`, `error` (it raised) or `invalid` (not a finite number)."""
    score: float
    parts: dict[str, float]
    message: str = ""
    trace: str = ""
    answer: str | None = None
    """`pred` of a dict result as a string: the extracted answer."""


class Answer(NamedTuple):
    """Result of one call: a reply per sample, or a single reply if the call failed as a whole."""

    replies: list[Reply]
    seconds: float
