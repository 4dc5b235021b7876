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
from camshaft.view.panels import ROWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 3
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
    return figure


def _draw(axis: Any, runs: Sequence[RunFolder], names: Sequence[str]) -> None:
    labels = []
    for run in runs:
        for name in names:
            steps, values = run.metrics.series(name)
            if not steps:
                continue
            parts = [run.name if len(runs) > 1 else "", name if len(names) > 1 else ""]
            labels.append(", ".join(filter(None, parts)))
            axis.plot(steps, values, label=labels[-1], marker="o" if len(steps) < MARKER_LIMIT else None, markersize=3)
    low, high = axis.get_ylim()
    if high - low < MIN_SPAN * max(abs(low), abs(high)):  # rounding errors of a constant would fill the chart
        middle = (low + high) / 2
        axis.set_ylim(middle - abs(middle) * MIN_SPAN, middle + abs(middle) * MIN_SPAN)
    axis.ticklabel_format(axis="y", useOffset=False)
    if any(labels):
        axis.legend(fontsize="x-small", framealpha=0.5)
