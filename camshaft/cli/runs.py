"""`camshaft show`, `camshaft compare` and `camshaft plot`: show the files of runs in the terminal or as an image.

    camshaft show checkpoints/demo/tiny --step 12 --groups 2
    camshaft show responses.parquet
    camshaft compare checkpoints/demo/first checkpoints/demo/second
    camshaft plot checkpoints/demo/first checkpoints/demo/second --out curves.png
    camshaft plot checkpoints/demo --metric actor/entropy --metric critic/score/mean

For `camshaft compare` and `camshaft plot`, a folder that contains several runs stands for all of them.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from camshaft.errors import ConfigError
from camshaft.tracking.run_folder import RunFolder, find_runs
from camshaft.view import text
from camshaft.view.plot import plot as plot_runs


def show(argv: Sequence[str]) -> int:
    """Print responses, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="camshaft show",
        description="Print the responses of a training step with their scores and advantages, or those in a file.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="folder of a run (trainer.default_local_dir), or output file of `camshaft generate`"
    )
    parser.add_argument("--step", type=int, help="training step; the newest with stored responses by default")
    parser.add_argument(
        "--groups", type=int, default=4, help="number of prompts; of a run, those with the most different scores"
    )
    parser.add_argument("--uid", help="show only the responses to the prompt with this ID")
    parser.add_argument("--width", type=int, help="maximum width of a line; that of the terminal by default")
    args = parser.parse_args(argv)
    width = args.width or shutil.get_terminal_size((160, 24)).columns
    if Path(args.run).expanduser().is_file():
        if args.step is not None or args.uid is not None:
            raise ConfigError(f"{args.run} is a file without steps; --step and --uid select responses of a run folder")
        sys.stdout.write(text.show_generated(Path(args.run).expanduser(), args.groups, width) + "\n")
        return 0
    run = RunFolder(args.run)
    steps = run.sample_steps()
    if not steps:
        raise ConfigError(
            f"{run.path} has no stored responses; a PPO run writes them after its first step, unless "
            "trainer.samples.enable=false"
        )
    step = steps[-1] if args.step is None else args.step
    sys.stdout.write(text.show_step(run, step, args.groups, width, args.uid) + "\n")
    return 0


def compare(argv: Sequence[str]) -> int:
    """Print the comparison, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="camshaft compare",
        description="Compare config, versions and metrics of runs. Equal config keys are left out.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or a folder that contains runs")
    args = parser.parse_args(argv)
    runs = find_runs(*args.runs)
    if len(runs) < 2:
        raise ConfigError(f"{', '.join(args.runs)}: found {len(runs)} runs; name at least two runs to compare")
    sys.stdout.write(text.compare(*runs) + "\n")
    return 0


def plot(argv: Sequence[str]) -> int:
    """Write the image, and return the exit status."""
    parser = argparse.ArgumentParser(prog="camshaft plot", description="Plot the metrics of runs with matplotlib.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, or a folder that contains runs")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="image to write; curves.png by default")
    parser.add_argument("--metric", action="append", default=[], help="metric to plot; repeat it for several")
    args = parser.parse_args(argv)
    runs = find_runs(*args.runs)
    if not runs:
        raise ConfigError(f"{', '.join(args.runs)}: no run found; name the folder of a run (trainer.default_local_dir)")
    charts = plot_runs(runs, args.out, args.metric)
    counts = [
        f"{len(things)} {noun}{'' if len(things) == 1 else 's'}" for noun, things in (("chart", charts), ("run", runs))
    ]
    sys.stdout.write(f"wrote {args.out}: {' of '.join(counts)}\n")
    return 0
