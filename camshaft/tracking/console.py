"""Console tracker: a live progress line on a terminal, or one line per step otherwise, and a summary at the end.

    step 12/100  reward 0.531  length 212  clipped 3%  grad 0.41  tok/s 18,402  left 0:03:21

Sample responses are printed above the line. Colors and animation depend on the terminal. The environment variable
NO_COLOR disables colors.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from camshaft.tracking.base import Row, RunInfo, Tracker
from camshaft.tracking.names import SCREEN

SHARES = ("clipped",)
"""Labels whose values are shown as percentages."""
ZERO_BY_CONSTRUCTION = ("policy kl",)
"""Labels that are omitted if their value is 0. With one update per batch, the old policy and the updated policy are the
same, so 0 carries no information."""

_WINDOW = 20
"""Number of recent steps from which the remaining time is estimated."""
_LINE_WIDTH = 120
"""Width of the lines without a terminal."""
_BAR_WIDTH = 12
_VALIDATION_INTERVAL = 60.0
"""Minimum time in seconds between two validations whose responses are printed."""
_MAX_VALIDATION_SAMPLES = 2


@cache
def shared_console() -> Console:
    """Return the console of this process. Lines that are printed to it appear above the live line.

    In a notebook, lines are plain text too, because each HTML output would be a separate block.
    """
    console = Console(highlight=False)
    if console.is_jupyter:
        console = Console(highlight=False, force_jupyter=False, force_terminal=False, width=_LINE_WIDTH)
    return console


class ConsoleTracker(Tracker):
    """Print metrics to standard output, or to another rich console."""

    synchronous = True

    def __init__(self, run: RunInfo, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self._run = run
        self._console = console or shared_console()
        self._clock = clock
        self._start_time = clock()
        self._step_times = deque([(run.resumed_step or 0, self._start_time)], maxlen=_WINDOW + 1)
        self._history: dict[str, list[float]] = {}
        self._num_steps = 0
        self._next_validation = -math.inf
        self._live: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=_BAR_WIDTH),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}", markup=False),
                console=self._console,
            )
            self._task = self._live.add_task("step", total=run.total_steps, completed=run.resumed_step or 0, facts="")
            self._live.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._num_steps += step > 0  # step 0 is the validation before training
        self._step_times.append((step, self._clock()))
        names = {label: next((name for name in names if name in metrics), None) for label, names in SCREEN.items()}
        values = {label: float(metrics[name]) for label, name in names.items() if name}
        values = {label: value for label, value in values.items() if value or label not in ZERO_BY_CONSTRUCTION}
        for label, value in values.items():
            self._history.setdefault(label, []).append(value)
        facts = [f"{label} {_format_value(label, value)}" for label, value in values.items()]
        remaining = f"left {self._format_remaining_time(step)}"
        if self._live:
            used = len("step ") + _BAR_WIDTH + len(f" {self._run.total_steps}/{self._run.total_steps} ")
            line = _join(facts, remaining, self._console.width - used)
            self._live.update(self._task, completed=step, facts=line)
        else:
            self._line(_join([f"step {step}/{self._run.total_steps}", *facts], remaining, _LINE_WIDTH))

    def log_samples(self, rows: Sequence[Row], step: int) -> None:
        names = ("best", "worst") if len(rows) > 1 else ("a",)
        for name, row in zip(names, rows, strict=False):
            self._sample(f"step {step}, {name} response: score {row['score']:.4g}", row)

    def log_generations(self, rows: Sequence[Row], step: int) -> None:
        if self._clock() < self._next_validation:
            return
        self._next_validation = self._clock() + _VALIDATION_INTERVAL
        for row in rows[:_MAX_VALIDATION_SAMPLES]:
            self._sample(f"validation after step {step}: score {row['score']:.4g}", row)

    def finish(self) -> None:
        if self._live:
            self._live.stop()
        if self._num_steps < 2:
            return
        elapsed = timedelta(seconds=round(self._clock() - self._start_time))
        table = Table("", "first", "last", "lowest", "highest", title=f"{self._num_steps} steps in {elapsed}")
        for label, values in self._history.items():
            cells = (values[0], values[-1], min(values), max(values))
            table.add_row(label, *(_format_value(label, value) for value in cells))
        self._console.print(table)

    def _sample(self, title: str, row: Row) -> None:
        """Print a response with its prompt, one line each."""
        self._line(title)
        for name in ("prompt", "response"):
            label = f"  {name:<9} "
            self._line(label + _shorten(str(row[name]), min(self._console.width, _LINE_WIDTH) - len(label)))

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _format_remaining_time(self, step: int) -> str:
        (first_step, start), (last_step, now) = self._step_times[0], self._step_times[-1]
        if last_step <= first_step:
            return "?"
        return str(timedelta(seconds=round((now - start) / (last_step - first_step) * (self._run.total_steps - step))))


def _join(facts: Sequence[str], last: str, width: int) -> str:
    """Join the facts with the last one. Facts at the end that exceed the width are omitted, except the first one."""
    count = len(facts)
    while count > 1 and len("  ".join([*facts[:count], last])) > width:
        count -= 1
    return "  ".join([*facts[:count], last])


def _shorten(text: str, width: int) -> str:
    """Return the text on one line, with its middle omitted if it is longer than `width`."""
    line = text.strip().replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    if len(line) <= width:
        return line
    tail = max(1, (width - 5) // 2)
    return f"{line[: max(1, width - 5 - tail)]} ... {line[-tail:]}"


def _format_value(label: str, value: float) -> str:
    """Format a share as a percentage, and any other value as a number."""
    if label in SHARES and math.isfinite(value):
        return f"{value:.0%}"
    return format_number(value)


def format_number(value: float) -> str:
    """Format a value with four significant digits, or without decimals from 1000 on."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
