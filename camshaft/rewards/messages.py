"""Contents of the messages between the reward pool and its workers.

The setup of a worker is a `Spec`, which it answers with a `LoadResult`. The payload of a request is `Samples`, and the
value of the reply is a list of `Outcome`.

Each sample is pickled separately, so a sample that cannot be unpickled does not affect the others. Both processes run
camshaft as the same user, so pickle adds no risk to that of running the reward function. Every worker process imports
this module, so it uses only the standard library.
"""

from typing import Any, Literal, NamedTuple

Kind = Literal["ok", "unscored", "error", "invalid", "timeout", "crash"]

DEFAULT_NAME = "compute_score"
"""Name of a function if none is configured."""


class FunctionSpec(NamedTuple):
    """A reward function to load."""

    path: str | None
    """A .py file or a module. If None, `name` is a built-in function, an entry point or `module:function`."""
    name: str
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    batched: bool | None = None
    """True if the function takes lists of samples; None means detect it from the parameter names."""
    label: str = ""
    """Name of the metrics of the function in a run with several functions."""
    weight: float = 1.0
    pickled: bytes | None = None
    """The function itself, for a function that was passed from Python. `path` is None, and `name` is its name."""
    checksum: str = ""
    """Checksum of the code of `pickled` and of the values that it captures. It is the same in every process."""

    @property
    def text(self) -> str:
        """Name of the function for error messages, without the name if none is configured."""
        if self.path is None:
            return self.name
        return self.path if self.name == DEFAULT_NAME else f"{self.path}:{self.name}"


class Spec(NamedTuple):
    """Reward functions to load, with the settings of a worker."""

    functions: tuple[FunctionSpec, ...]
    timeout: float
    sys_path: list[str]
    """Module search path of the driver, which is appended to that of the worker."""
    max_abs_score: float
    has_environments: bool = False
    """True in a run with environments, whose processes call the functions with a parameter `environments`."""


class Sample(NamedTuple):
    """The arguments of a reward function for one response."""

    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: Any
    row: dict[str, Any] = {}  # noqa: RUF012
    """Columns of the data file that the function reads."""


class FunctionInfo(NamedTuple):
    name: str
    """Name of the function in its file or module."""
    batched: bool
    concurrent: bool
    """True if the function is a coroutine function for single samples, whose calls can run at the same time."""
    columns: tuple[str, ...] | None
    """Columns of the data file that the function reads, beside those of `Sample`; None for all columns."""
    required: tuple[str, ...]
    """Columns of the data file without which the function cannot be called."""
    takes_environments: bool = False
    """True if the function is called in the processes of environments."""


class LoadResult(NamedTuple):
    """Result of loading the functions. `error` is None on success."""

    error: str | None
    functions: tuple[FunctionInfo, ...] = ()


class Samples(NamedTuple):
    """A call for the worker to make. It returns one `Outcome` per sample, or a single one if the whole call failed."""

    function: int
    """Index in `Spec.functions`."""
    samples: list[bytes]
    """Pickled samples: a single one, or a batch for a batched function."""


class Outcome(NamedTuple):
    """Result of one sample. `score`, `parts` and `answer` are valid only if `kind` is "ok"."""

    kind: Kind
    """`unscored` (the function returned None), `error` (it raised), `invalid` (the result is not a finite number),
    `timeout`, `crash` (the process ended), or `ok`."""
    score: float = 0.0
    parts: dict[str, float] = {}  # noqa: RUF012
    message: str = ""
    trace: str = ""
    answer: str | None = None
    """Extracted answer, the entry `pred` of a dict result, as a string."""
    seconds: float = 0.0
    """Duration in seconds of the call that produced this outcome. The pool sets it."""

    @property
    def failed(self) -> bool:
        return self.kind not in ("ok", "unscored")
