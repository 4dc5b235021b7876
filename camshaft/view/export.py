"""The run page as a single HTML file, which opens from a disk without a server.

export(["checkpoints/demo"], Path("runs.html"))
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from camshaft import storage
from camshaft.errors import ConfigError
from camshaft.view import data
from camshaft.view.lanes import lanes
from camshaft.view.server import STATIC, Page, configs

MAX_STEPS = 6
"""Maximum number of steps per run whose responses a file contains: the first, the last and some between them."""
_DATA = '<script type="application/json" id="data">'


def export(folders: Sequence[str | Path], path: Path) -> int:
    """Write the page of all runs in the folders, and return the number of runs. Only an older page is replaced."""
    if path.exists() and not (path.is_file() and _DATA.encode() in path.read_bytes()):
        raise ConfigError(f"{path} already exists and is not an exported page; use another file")
    page = Page(folders)
    overview = page.answer("/runs", {})
    if not page.runs:
        raise ConfigError(f"{', '.join(map(str, folders))}: no run found; name the folder of a run")
    contents: dict[str, Any] = {"/runs": overview}
    contents["curves"] = page.curves(page.runs)
    contents["phases"] = [data.phases(run) for run in page.runs]
    contents["lanes"] = [lanes(run) for run in page.runs]
    contents["configs"] = [configs([run]) for run in page.runs]
    contents["responses"] = {}
    for number, run in enumerate(page.runs):
        steps = spread(run.sample_steps(), MAX_STEPS)
        overview["runs"][number]["samples"] = steps
        contents["responses"] |= {f"{number}/{step}": data.responses(run, step) | {"steps": steps} for step in steps}
    with storage.new_file(path) as work:
        work.write_text(page_text(contents), encoding="utf-8")
    return len(page.runs)


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the steps, at equal distances, with the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def page_text(contents: dict[str, Any]) -> str:
    """Return the page with all its files and data in one text."""
    html, script, style, plot, plot_style = (
        (STATIC / name).read_text(encoding="utf-8")
        for name in ("page.html", "page.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css")
    )
    # "<" as an escape cannot end the script element, whatever a response contains.
    embedded = json.dumps(contents, default=str, allow_nan=False).replace("<", "\\u003c")
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    parts = {
        '<link rel="stylesheet" href="uPlot.css">': f"<style>{plot_style}</style>",
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script src="uPlot.js"></script>': f"<script>{plot}</script>",
        '<script src="page.js" defer></script>': "",
        "</head>": f'<meta http-equiv="Content-Security-Policy" content="{policy}"></head>',
        "</body>": f"{_DATA}{embedded}</script><script>{script}</script></body>",
    }
    for old, new in parts.items():
        assert old in html, old
        html = html.replace(old, new)
    return html
