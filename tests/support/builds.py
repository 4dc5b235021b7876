"""Build the sdist and the wheel of this repository, without network access."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("camshaft", "docs", "examples", "tests", "benchmarks")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def copy_sources(target: Path) -> Path:
    """Copy the repository without environments and build outputs, which a build would read, and return the copy."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, target)
    return target


def build(kind: str, source: Path, target: Path) -> Path:
    """Build an "sdist" or a "wheel" with the setuptools of this environment, and return its path."""
    process = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(target)],
        cwd=source, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return target / process.stdout.splitlines()[-1]


def build_wheel_from(sdist: Path, target: Path) -> Path:
    """Build the wheel from the unpacked sdist, as pip does, and return its path."""
    with tarfile.open(sdist) as archive:
        archive.extractall(target / "unpacked", filter="data")
    return build("wheel", next((target / "unpacked").iterdir()), target)
