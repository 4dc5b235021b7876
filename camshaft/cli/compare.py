"""`camshaft compare RUN RUN`: print the differences of two runs in config, versions and metrics.

camshaft compare checkpoints/demo/first checkpoints/demo/second
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from camshaft.tracking.run_folder import RunFolder
from camshaft.view.text import compare


def main(argv: Sequence[str]) -> int:
    """Print the comparison, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="camshaft compare", description="Compare config, versions and metrics of two runs."
    )
    parser.add_argument("first", metavar="RUN", help="folder of a run (trainer.default_local_dir)")
    parser.add_argument("second", metavar="RUN", help="folder of another run")
    args = parser.parse_args(argv)
    sys.stdout.write(compare(RunFolder(args.first), RunFolder(args.second)) + "\n")
    return 0
