"""Curves of runs as an image, with matplotlib.

plot([run, other], Path("curves.png"), metrics=["actor/entropy"])
figure = draw([run])            # a notebook shows it
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from camshaft.errors import ConfigError
from camshaft.plugins import install_command
from camshaft.tracking.run_folder import RunFolder
from camshaft.view.panels import BAND, MEDIAN, ROWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 3
STYLES = ("-", "--", ":", "-.")
"""Styles of the metrics in a chart of several runs."""
MAX_BANDS = 3
"""Maximum number of runs whose quantiles are shown. More bands would hide each other."""
DPI = 120
MARKER_LIMIT = 20
"""Curves with fewer points have a marker at each point."""
MIN_SPAN = 1e-6
"""Smallest span of an axis, relative to its values."""


def plot(runs: Sequence[RunFolder], path: Path, metrics: Sequence[str] = ()) -> list[str]:
    """Write the curves of the runs to an image, and return the titles of its charts."""
    figure = draw(runs, metrics)
    figure.savefig(path, dpi=DPI)
    return [axis.get_title() for axis in figure.axes]


def draw(runs: Sequence[RunFolder], metrics: Sequence[str] = ()) -> Figure:
    """Draw the curves of the runs.

    `metrics` selects metrics, each in its own chart, instead of those that the runs have logged in `ROWS`.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"plots require matplotlib, which is not installed: {install_command('matplotlib')}"
        ) from error
    for run in runs:
        run.metrics.poll()
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names))
    unknown = [name for name in metrics if name not in names]
    if unknown:
        raise ConfigError(f"no run has logged {', '.join(unknown)}; see docs/metrics.md for the names of metrics")
    of_panels = ((panel.title, panel.select(names)) for panels in ROWS.values() for panel in panels)
    charts = [(name, [name]) for name in metrics] or [(title, chart) for title, chart in of_panels if chart]
    if not charts:
        raise ConfigError("the runs have logged no metrics yet; wait for their first step")
    columns = min(COLUMNS, len(charts))
    rows = math.ceil(len(charts) / columns)

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            image = io.BytesIO()
            self.savefig(image, format="png")
            return image.getvalue()

    figure = NotebookFigure(figsize=(5 * columns, 3 * rows), layout="constrained")
    for index, (title, chart) in enumerate(charts):
        axis = figure.add_subplot(rows, columns, index + 1)
        _draw(axis, runs, chart)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    if len(runs) > 1:
        lines = [Line2D([], [], color=f"C{index}") for index in range(len(runs))]
        figure.legend(lines, [run.name for run in runs], loc="outside upper center", ncols=columns, fontsize="small")
    return figure


def _draw(axis: Any, runs: Sequence[RunFolder], names: Sequence[str]) -> None:
    """Draw the metrics of a chart. Runs differ in color, and the metrics of several runs in the style of the line."""
    several = len(runs) > 1
    lines = [name for name in names if name not in BAND and not (several and name == MEDIAN)]
    for number, run in enumerate(runs):
        for line, name in enumerate(lines):
            steps, values = run.metrics.series(name)
            if steps:
                marker = "o" if len(steps) < MARKER_LIMIT else None
                style = STYLES[line % len(STYLES)] if several else "-"
                color = f"C{number if several else line}"
                axis.plot(steps, values, label=name, color=color, linestyle=style, marker=marker, markersize=3)
        (steps, low), (_, high) = (run.metrics.series(name) for name in BAND)
        if BAND[0] in names and steps and len(low) == len(high) and len(runs) <= MAX_BANDS:
            axis.fill_between(steps, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
    low, high = axis.get_ylim()
    if high - low < MIN_SPAN * max(abs(low), abs(high)):  # rounding errors of a constant would fill the chart
        middle = (low + high) / 2
        axis.set_ylim(middle - abs(middle) * MIN_SPAN, middle + abs(middle) * MIN_SPAN)
    axis.ticklabel_format(axis="y", useOffset=False)
    if len(lines) > 1:
        handles, labels = axis.get_legend_handles_labels()
        shown = dict(zip(labels, handles, strict=True))
        legend = axis.legend(shown.values(), shown.keys(), fontsize="x-small", framealpha=0.5)
        for handle in legend.get_lines() if several else ():
            handle.set_color("gray")
