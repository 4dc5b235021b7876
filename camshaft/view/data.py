"""The data of the run page: overview, curves, responses and differences, as JSON values.

    overview(run, now)["state"]
    curves(run, points=800)["critic/score/mean"]     # {"steps": [...], "values": [...]}
    responses(run, step=12)["rows"]

Curves are reduced to the extremes of intervals of steps, so that a spike of a single step remains visible.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from camshaft.errors import ConfigError
from camshaft.tracking.names import find
from camshaft.tracking.run_folder import TIME, RunFolder
from camshaft.view.advice import advise
from camshaft.view.panels import PHASES, REWARD, ROWS, VALIDATION, first_logged

POINTS = 800
"""Maximum number of points of a curve."""
MAX_ROWS = 2048
"""Maximum number of responses of a step on the page."""
MAX_TEXT = 200_000
"""Maximum number of characters of a text on the page."""
TOKEN_COLUMNS = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "entropy", "advantages", "values", "returns")


def overview(run: RunFolder, now: float) -> dict[str, Any]:
    """Return the line of a run in the table of runs."""
    run.metrics.poll()
    info, status, names = run.info(), run.status(), run.metrics.names
    reward, validation = first_logged(REWARD, names), first_logged(VALIDATION, names)
    state = run.state()
    return {
        "name": run.name,
        "path": str(run.path),
        "command": info.get("command", ""),
        "state": state,
        "step": run.metrics.steps[-1] if run.metrics.steps else 0,
        "total": info.get("total_steps"),
        "phase": status.phase if status is not None and state in ("running", "killed") else "",
        "age": max(0.0, now - status.since) if status is not None and state == "running" else None,
        "reward": _number(None if reward is None else run.metrics.last(reward)),
        "validation": _number(None if validation is None else run.metrics.last(validation)),
        "samples": run.sample_steps(),
        "advice": [{"title": advice.title, "text": advice.text} for advice in advise(run, now)],
    }


def curves(run: RunFolder, points: int = POINTS) -> dict[str, Any]:
    """Return the curves of all metrics that a panel shows, and their times."""
    shown = dict.fromkeys(name for row in ROWS for panel in row.panels for name in panel.select(run.metrics.names))
    phases = [f"timing_s/{phase}" for phase in PHASES if f"timing_s/{phase}" in run.metrics.names]
    names = [*shown, *(name for name in phases if name not in shown), TIME]
    result = {}
    for name in names:
        steps, values = run.metrics.series(name)
        kept = reduce_points(values, points)
        result[name] = {"steps": [steps[i] for i in kept], "values": [_number(values[i]) for i in kept]}
    return result


def layout(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return rows and panels with the metrics that at least one run has logged."""
    logged = list(names)
    rows = []
    for row in ROWS:
        panels = [{"title": panel.title, "names": panel.select(logged)} for panel in row.panels]
        if shown := [panel for panel in panels if panel["names"]]:
            rows.append({"title": row.title, "panels": shown})
    return rows


def descriptions(names: Iterable[str]) -> dict[str, str]:
    """Return the description of each metric that is documented."""
    texts = {}
    for name in names:
        try:
            metric = find(name)
        except ConfigError:
            continue
        texts[name] = f"{metric.description} ({metric.unit})" if metric.unit else metric.description
    return texts


def reduce_points(values: Sequence[float] | array[float], points: int) -> list[int]:
    """Return the indices of at most `points` values: the first, the last, and the extremes of equal intervals."""
    count = len(values)
    if count <= points:
        return list(range(count))
    intervals = max(1, (points - 2) // 2)
    kept = {0, count - 1}
    for interval in range(intervals):
        span = range(interval * count // intervals, (interval + 1) * count // intervals)
        finite = [i for i in span if math.isfinite(values[i])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)


def responses(run: RunFolder, step: int) -> dict[str, Any]:
    """Return the responses of a step. Values per token are rounded to four digits."""
    rows = run.samples(step).slice(0, MAX_ROWS).to_pylist()
    return {"step": step, "steps": run.sample_steps(), "rows": [_row(row) for row in rows]}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in row.items():
        if isinstance(value, str):
            result[name] = value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "..."
        elif name in TOKEN_COLUMNS:
            result[name] = None if value is None else [_number(item, 4) for item in value]
        elif isinstance(value, float):
            result[name] = _number(value)
        else:
            result[name] = value
    return result


def _number(value: float | None, digits: int = 6) -> float | None:
    """Return a number as JSON can hold it: rounded, and None for nan and infinite values."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None
