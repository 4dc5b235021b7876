"""Messages between the reward pool and its workers.

The pool sends a worker one `Spec` and then lists of calls. A call is a list of pickled `Sample`s: a single sample, or a
batch for batched functions. The worker replies with `LoadResult` and then with one `CallResult` per call, in order.

Each sample is pickled separately, so a sample that cannot be unpickled does not affect the others. Both processes run
camshaft as the same user, so pickle adds no risk to that of running the reward function. Every worker process imports
this module, so it uses only the standard library.
"""

from typing import Any, NamedTuple


class Spec(NamedTuple):
    """Reward function to load, with its settings."""

    path: str | None
    """A .py file or a module. If None, `name` is a built-in function, an entry point or `module:function`."""
    name: str
    kwargs: dict[str, Any]
    timeout: float
    sys_path: list[str]
    """Module search path of the driver, which is appended to that of the worker."""
    max_abs_score: float
    batched: bool | None = None
    """True if the function takes lists of samples; None means detect it from the parameter names."""


class Sample(NamedTuple):
    """The arguments of a reward function for one response."""

    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: Any
    row: dict[str, Any] = {}  # noqa: RUF012
    """Columns of the data file that the function reads."""


class LoadResult(NamedTuple):
    """Result of loading the function. `error` is None on success."""

    error: str | None
    batched: bool = False
    columns: tuple[str, ...] | None = ()
    """Columns of the data file that the function reads, beside those of `Sample`; None for all columns."""
    required: tuple[str, ...] = ()
    """Columns of the data file without which the function cannot be called."""


class Reply(NamedTuple):
    """Result of one sample."""

    kind: str
    """`ok`, `error` (the function raised) or `invalid` (the result is not a finite number)."""
    score: float
    parts: dict[str, float]
    message: str = ""
    trace: str = ""
    answer: str | None = None
    """Extracted answer, the entry `pred` of a dict result, as a string."""


class CallResult(NamedTuple):
    """Result of one call: one reply per sample, or a single reply if the whole call failed."""

    replies: list[Reply]
    seconds: float
