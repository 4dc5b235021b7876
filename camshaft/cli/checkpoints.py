"""`camshaft checkpoints FOLDER`: list the checkpoints of a run with their state, size and age.

    camshaft checkpoints checkpoints/demo/tiny

    step  state       size    age
      10  complete  3.4 MB    2 h  best
      20  complete  3.4 MB  3 min  newest
      30  broken    1.1 MB   12 s  'critic' is missing or incomplete

The command compares file sizes with the manifests. With `--verify`, it also verifies the checksums of all files, as a
run does when it resumes, and the state of a good checkpoint is `intact`. The exit status is 1 if every checkpoint is
broken.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from camshaft import storage
from camshaft.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Print the table of checkpoints, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="camshaft checkpoints",
        description="List the checkpoints of a run with their state, size and age, and mark the newest and the best.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="trainer.default_local_dir of the run")
    parser.add_argument("--verify", action="store_true", help="verify the checksums of all files")
    args = parser.parse_args(argv)
    root = Path(args.folder).expanduser()
    from camshaft.checkpoint.manager import (
        BEST,
        TRAINER,
        find_problem,
        folder_size,
        format_size,
        read_marker,
    )

    if not root.is_dir():
        raise ConfigError(f"{root} does not exist; set FOLDER to trainer.default_local_dir of a run")
    steps = storage.step_folders(root)
    if not steps:
        raise ConfigError(
            f"{root} contains no checkpoints (global_step_<n>); set FOLDER to trainer.default_local_dir of a run"
        )
    problems = {step: find_problem(folder, args.verify) for step, folder in steps}
    newest = max((step for step, problem in problems.items() if problem is None), default=None)
    best = read_marker(root, BEST)
    rows = [("step", "state", "size", "age", "")]
    for step, folder in steps:
        problem = problems[step]
        marks = [word for word, which in (("newest", newest), ("best", best)) if step == which]
        state = "broken" if problem is not None else "intact" if args.verify else "complete"
        age = _age(folder, folder / TRAINER / storage.MANIFEST)
        rows.append((str(step), state, format_size(folder_size(folder)), age, ", ".join(marks) or problem or ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for number, state, size, age, note in rows:
        cells = (number.rjust(widths[0]), state.ljust(widths[1]), size.rjust(widths[2]), age.rjust(widths[3]), note)
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return 0 if newest is not None else 1


def _age(folder: Path, manifest: Path) -> str:
    """Format the time since the manifest was written. Without a manifest, use the modification time of the folder."""
    seconds = int(max(0.0, time.time() - (manifest if manifest.is_file() else folder).stat().st_mtime))
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {name}"
    return f"{seconds} s"
