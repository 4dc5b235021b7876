"""`camshaft plot RUN...`: write the curves of runs to an image.

    camshaft plot checkpoints/demo/first checkpoints/demo/second --out curves.png
    camshaft plot checkpoints/demo --metric actor/entropy --metric critic/score/mean

A folder that contains several runs stands for all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from camshaft.errors import ConfigError
from camshaft.tracking.run_folder import find_runs
from camshaft.view.plot import plot


def main(argv: Sequence[str]) -> int:
    """Write the image, and return the exit status."""
    parser = argparse.ArgumentParser(prog="camshaft plot", description="Plot the metrics of runs with matplotlib.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or a folder that contains runs")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="image to write; curves.png by default")
    parser.add_argument("--metric", action="append", default=[], help="metric to plot; repeat it for several")
    args = parser.parse_args(argv)
    runs = find_runs(*args.runs)
    if not runs:
        raise ConfigError(f"{', '.join(args.runs)}: no run found; name the folder of a run (trainer.default_local_dir)")
    charts = plot(runs, args.out, args.metric)
    counts = [
        f"{len(things)} {noun}{'' if len(things) == 1 else 's'}" for noun, things in (("chart", charts), ("run", runs))
    ]
    sys.stdout.write(f"wrote {args.out}: {' of '.join(counts)}\n")
    return 0
