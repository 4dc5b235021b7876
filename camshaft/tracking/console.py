"""Console tracker: a live progress line on a terminal, or one line per step otherwise, and a summary at the end.

    step 12/100  reward 0.531  kl 0.0012  tok/s 18,402  left 0:03:21

Colors and animation depend on the terminal. The environment variable NO_COLOR disables colors.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from camshaft.tracking.base import RunInfo, Tracker

HEADLINES: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean", "reward/mean"),
    "loss": ("train/loss",),
    "accuracy": ("train/accuracy",),
    "val": ("val/reward/mean", "val/accuracy", "val/loss"),
    "kl": ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"),
    "tok/s": ("perf/throughput",),
}
"""Maps each label on the line to metrics. The first of them that is available is shown."""

_WINDOW = 20
"""Number of recent steps from which the remaining time is estimated."""


class ConsoleTracker(Tracker):
    """Print metrics to standard output, or to another rich console."""

    synchronous = True

    def __init__(self, run: RunInfo, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self._run = run
        self._console = console or Console()
        self._clock = clock
        self._start_time = clock()
        self._step_times: deque[tuple[int, float]] = deque(
            [(run.resumed_step or 0, self._start_time)], maxlen=_WINDOW + 1
        )
        self._history: dict[str, list[float]] = {}
        self._num_steps = 0
        self._live: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}", markup=False),
                console=self._console,
            )
            self._task = self._live.add_task(
                run.experiment, total=run.total_steps, completed=run.resumed_step or 0, facts=""
            )
            self._live.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._num_steps += step > 0  # step 0 is the validation before training
        self._step_times.append((step, self._clock()))
        names = {label: next((name for name in names if name in metrics), None) for label, names in HEADLINES.items()}
        values = {label: metrics[name] for label, name in names.items() if name}
        for label, value in values.items():
            self._history.setdefault(label, []).append(float(value))
        facts = [f"{label} {format_number(value)}" for label, value in values.items()]
        facts.append(f"left {self._format_remaining_time(step)}")
        if self._live:
            self._live.update(self._task, completed=step, facts="  ".join(facts))
        else:
            self._line("  ".join([f"step {step}/{self._run.total_steps}", *facts]))

    def finish(self) -> None:
        if self._live:
            self._live.stop()
        if not self._num_steps:
            return
        elapsed = timedelta(seconds=round(self._clock() - self._start_time))
        table = Table("", "first", "last", "lowest", "highest", title=f"{self._num_steps} steps in {elapsed}")
        for label, values in self._history.items():
            cells = (values[0], values[-1], min(values), max(values))
            table.add_row(label, *(format_number(value) for value in cells))
        self._console.print(table)

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _format_remaining_time(self, step: int) -> str:
        (first_step, start), (last_step, now) = self._step_times[0], self._step_times[-1]
        if last_step <= first_step:
            return "?"
        return str(timedelta(seconds=round((now - start) / (last_step - first_step) * (self._run.total_steps - step))))


def format_number(value: float) -> str:
    """Format a value with four significant digits, or without decimals from 1000 on."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
