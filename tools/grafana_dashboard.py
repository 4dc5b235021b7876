"""Write the Grafana dashboard for the Prometheus tracker: one chart for each panel of the page of `camshaft view`.

python tools/grafana_dashboard.py        # writes examples/grafana/camshaft.json
"""

import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from camshaft.view.panels import ROWS, Panel

PATH = Path(__file__).parents[1] / "examples" / "grafana" / "camshaft.json"
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUNS = 'project=~"$project", run=~"$run"'
COLUMNS, WIDTH, HEIGHT = 4, 6, 7
"""Charts per row, and the size of a chart on Grafana's grid of 24 columns."""


def dashboard() -> dict[str, Any]:
    return {
        "uid": "camshaft",
        "title": "camshaft",
        "tags": ["camshaft"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [_data_source_variable(), _variable("project"), _variable("run", 'project=~"$project"')]
        },
        "panels": list(_panels()),
    }


def query(panel: Panel) -> str:
    """Return the PromQL expression that selects the metrics of a panel."""
    names = "|".join("camshaft_" + re.sub(r"[/@-]", "_", pattern) for pattern in panel.patterns)
    return f'{{__name__=~"{names}", {RUNS}}}'


def _panels() -> Iterator[dict[str, Any]]:
    ids, top = count(1), 4
    progress = f"camshaft_step{{{RUNS}}}"
    yield _chart(next(ids), "Steps completed", "stat", progress, 0, 0, 4)
    yield _chart(next(ids), "Total steps", "stat", f"camshaft_total_steps{{{RUNS}}}", WIDTH, 0, 4)
    age = f"time() - camshaft_step_timestamp_seconds{{{RUNS}}}"
    yield _chart(next(ids), "Seconds since the last step", "stat", age, 2 * WIDTH, 0, 4)
    for title, panels in ROWS.items():
        yield {
            "id": next(ids),
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            "panels": [],
        }
        top += 1
        for index, panel in enumerate(panels):
            x, y = WIDTH * (index % COLUMNS), top + HEIGHT * (index // COLUMNS)
            yield _chart(next(ids), panel.title, "timeseries", query(panel), x, y, HEIGHT)
        top += HEIGHT * -(-len(panels) // COLUMNS)


def _chart(number: int, title: str, kind: str, expression: str, x: int, y: int, height: int) -> dict[str, Any]:
    legend = "{{run}} {{__name__}}" if kind == "timeseries" else "{{run}}"
    return {
        "id": number,
        "type": kind,
        "title": title,
        "datasource": DATA_SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": height},
        "targets": [{"refId": "A", "datasource": DATA_SOURCE, "expr": expression, "legendFormat": legend}],
    }


def _data_source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(label: str, selector: str = "") -> dict[str, Any]:
    """Return a variable whose values are those of a label of `camshaft_step`."""
    series = f"camshaft_step{{{selector}}}" if selector else "camshaft_step"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": f"label_values({series}, {label})", "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(text(), encoding="utf-8")
