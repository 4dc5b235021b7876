"""`camshaft checkpoints FOLDER`: which steps of a run there are, whole or broken, how large and how old.

    camshaft checkpoints checkpoints/demo/tiny

    step  state     size    age
      10  whole   3.4 MB    2 h  best
      20  whole   3.4 MB  3 min  newest
      30  broken  1.1 MB   12 s  'critic' is not there, or was not written to its end

Sizes of files are held against their manifests; checksums are when a run resumes. Exit status 1 if no step is whole.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from camshaft import storage
from camshaft.checkpoint.manager import BEST, TRAINER, broken, in_words, marked, size_of
from camshaft.errors import ConfigError


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    root = Path(options.folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}; give trainer.default_local_dir of a run")
    steps = storage.step_folders(root)
    if not steps:
        raise ConfigError(f"{root} holds no steps (global_step_<n>); give trainer.default_local_dir of a run")
    problems = {step: broken(folder) for step, folder in steps}
    newest = max((step for step, problem in problems.items() if problem is None), default=None)
    best = marked(root, BEST)
    rows = [("step", "state", "size", "age", "")]
    for step, folder in steps:
        problem = problems[step]
        marks = [word for word, which in (("newest", newest), ("best", best)) if step == which]
        state = "whole" if problem is None else "broken"
        rows.append((str(step), state, in_words(size_of(folder)), _age(folder), ", ".join(marks) or problem or ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for number, state, size, age, note in rows:
        cells = (number.rjust(widths[0]), state.ljust(widths[1]), size.rjust(widths[2]), age.rjust(widths[3]), note)
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return 0 if newest is not None else 1


def _age(folder: Path) -> str:
    """Since the step was whole; of one that is not, since its folder was last touched."""
    manifest = folder / TRAINER / storage.MANIFEST
    seconds = int(max(0.0, time.time() - (manifest if manifest.is_file() else folder).stat().st_mtime))
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {name}"
    return f"{seconds} s"
