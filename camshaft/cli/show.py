"""`camshaft show RUN --step N`: print the responses of a training step, by group.

camshaft show checkpoints/demo/tiny --step 12 --groups 2
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence

from camshaft.errors import ConfigError
from camshaft.tracking.run_folder import RunFolder
from camshaft.view.text import show_step


def main(argv: Sequence[str]) -> int:
    """Print the responses of a step, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="camshaft show", description="Print the responses of a training step with their scores and advantages."
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run (trainer.default_local_dir)")
    parser.add_argument("--step", type=int, help="training step; the newest with stored responses by default")
    parser.add_argument("--groups", type=int, default=4, help="number of prompts, those with the most different scores")
    parser.add_argument("--uid", help="show only the responses to the prompt with this ID")
    parser.add_argument("--width", type=int, help="maximum width of a line; that of the terminal by default")
    args = parser.parse_args(argv)
    run = RunFolder(args.run)
    steps = run.sample_steps()
    if not steps:
        raise ConfigError(
            f"{run.path} has no stored responses; a PPO run writes them after its first step, unless "
            "trainer.samples.enable=false"
        )
    width = args.width or shutil.get_terminal_size((160, 24)).columns
    step = steps[-1] if args.step is None else args.step
    sys.stdout.write(show_step(run, step, args.groups, width, args.uid) + "\n")
    return 0
