"""The data of the run page: overview, curves, responses and differences, as JSON values.

    overview(run, now)["state"]
    curves(run, points=800)["critic/score/mean"]     # {"steps": [...], "values": [...]}
    responses(run, step=12)["rows"]

Curves are reduced to the extremes of intervals of steps, so that a spike of a single step remains visible.
"""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from camshaft.errors import ConfigError
from camshaft.tracking.names import find
from camshaft.tracking.run_folder import TIME, TOKEN_COLUMNS, RunFolder
from camshaft.view.advice import advise
from camshaft.view.panels import PHASES, REWARD, ROWS, VALIDATE, VALIDATION, first_logged

POINTS = 600
"""Maximum number of points of a curve. Charts are about 300 pixels wide, and an interval has two points."""
MAX_ROWS = 2048
"""Maximum number of responses of a step on the page."""
MAX_TEXT = 200_000
"""Maximum number of characters of a text on the page."""
PHASE_STEPS = 50
"""Number of steps whose mean times the page shows."""


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
        "step": run.metrics.last_step,
        "total": info.get("total_steps"),
        "phase": status.phase if status is not None and state in ("running", "killed") else "",
        "age": max(0.0, now - status.since) if status is not None and state == "running" else None,
        "reward": _number(None if reward is None else run.metrics.last(reward)),
        "validation": _number(None if validation is None else run.metrics.last(validation)),
        "samples": run.sample_steps(),
        "advice": [advice._asdict() for advice in advise(run, now)],
    }


def curves(run: RunFolder, points: int = POINTS, first: float = -math.inf, last: float = math.inf) -> dict[str, Any]:
    """Return the curves of all metrics that a panel shows, and their times, from step `first` to step `last`."""
    rows = layout(tuple(run.metrics.names))
    shown = dict.fromkeys(name for row in rows for panel in row["panels"] for name in panel["names"])
    result = {}
    for name in [*shown, TIME]:
        steps, values = run.metrics.arrays(name)
        if name == TIME and len(values):
            values = values - values[0]  # seconds since the first step, which rounding would remove from a date
        if first > -math.inf or last < math.inf:
            is_inside = (steps >= first) & (steps <= last)
            steps, values = steps[is_inside], values[is_inside]
        kept = reduce_points(values, points)
        result[name] = {"steps": steps[kept].tolist(), "values": _numbers(values[kept])}
    return result


def phases(run: RunFolder) -> dict[str, Any]:
    """Return the mean seconds of a step and of its phases over the last `PHASE_STEPS` steps.

    The time of validations is added to that of the steps.
    """
    run.metrics.poll()
    means: dict[str, Any] = {}
    for phase in ("step", *PHASES):
        values = run.metrics.arrays(f"timing_s/{phase}")[1][-PHASE_STEPS:]
        if len(values):
            means[phase] = _number(float(values.mean()))
    steps, seconds = run.metrics.arrays(f"timing_s/{VALIDATE}")
    count = min(PHASE_STEPS, run.metrics.last_step)
    if "step" in means and (total := float(seconds[steps > run.metrics.last_step - count].sum())):
        means |= {"step": _number(means["step"] + total / count), VALIDATE: _number(total / count)}
    return means


@lru_cache
def layout(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return rows and panels with the metrics that at least one run has logged."""
    rows = []
    for title, panels in ROWS.items():
        shown = [
            {"title": panel.title, "names": logged, "unit": _unit(logged[0])}
            for panel in panels
            if len(logged := panel.select(names)) >= panel.fewest
        ]
        if shown:
            rows.append({"title": title, "panels": shown})
    return rows


def _unit(name: str) -> str:
    unit = find(name).unit
    return "" if unit == "1" else unit


@lru_cache
def descriptions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the description of each metric that is documented."""
    texts = {}
    for name in names:
        try:
            metric = find(name)
        except ConfigError:
            continue
        texts[name] = f"{metric.description} ({metric.unit})" if metric.unit else metric.description
    return texts


def reduce_points(values: NDArray[np.float64], points: int) -> NDArray[np.int64]:
    """Return the indices of at most `points` values: the first, the last, and the extremes of equal intervals."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    length = math.ceil(count / max(1, (points - 4) // 2))
    is_finite = np.isfinite(values)
    kept = {0, count - 1}
    for sign in (1, -1):
        signed = np.where(is_finite, sign * values, np.inf)
        rows = signed[: count // length * length].reshape(-1, length)
        kept.update((rows.argmin(axis=1) + np.arange(len(rows)) * length).tolist())
        if rest := count % length:
            kept.add(count - rest + int(signed[-rest:].argmin()))
    return np.array([i for i in sorted(kept) if is_finite[i] or i in (0, count - 1)])


def responses(run: RunFolder, step: int) -> dict[str, Any]:
    """Return the responses of a step. Values per token are rounded to four digits."""
    rows = run.samples(step).slice(0, MAX_ROWS).to_pylist()
    return {"step": step, "steps": run.sample_steps(), "rows": [response(row) for row in rows]}


def response(row: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in row.items():
        if name == "messages":
            result[name] = [message | {"content": _cut(str(message["content"]))} for message in json.loads(value)]
        elif isinstance(value, str):
            result[name] = _cut(value)
        elif name in TOKEN_COLUMNS:
            result[name] = None if value is None else [_number(item, 4) for item in value]
        elif isinstance(value, float):
            result[name] = _number(value)
        else:
            result[name] = value
    return result


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def _numbers(values: NDArray[np.float64], digits: int = 6) -> list[float | None]:
    """Return numbers as JSON can hold them: rounded, and None for nan and infinite values."""
    with np.errstate(all="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(values))))
        rounded = np.where(np.isfinite(scale) & (scale > 0), np.round(values * scale) / scale, values)
    if np.isfinite(rounded).all():
        return rounded.tolist()
    return [value if math.isfinite(value) else None for value in rounded.tolist()]


def _number(value: float | None, digits: int = 6) -> float | None:
    """Return a number as `_numbers` does."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None
