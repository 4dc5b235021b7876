"""The sdist and the wheel install into an empty environment, where the commands of the README run.

The installation needs a package index, and downloads torch unless pip has it in its cache.
"""

import os
import subprocess
import venv
from pathlib import Path

import pytest
from support.builds import build, build_wheel_from, copy_sources
from support.pages import ROOT, bash, script

from camshaft import __version__


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_distributions_install_and_run_the_readme(tmp_path: Path) -> None:
    sdist = build("sdist", copy_sources(tmp_path / "copy"), tmp_path)
    wheel = build_wheel_from(sdist, tmp_path)
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    environment = {**os.environ, "PYTHONPATH": "", "PATH": f"{programs}:{os.environ['PATH']}"}
    install = [str(programs / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, f"{sdist}[plot]"], check=True, timeout=1200, env=environment)
    version = subprocess.run(
        [programs / "camshaft", "--version"], check=True, timeout=60, env=environment, capture_output=True, text=True
    )
    assert version.stdout.strip() == f"camshaft {__version__}"
    subprocess.run([*install, "--no-deps", "--force-reinstall", str(wheel)], check=True, timeout=300, env=environment)
    (tmp_path / "empty").mkdir()
    path = f"export PATH={programs}:$PATH PYTHONPATH="
    bash(tmp_path / "empty", [path, *script(tmp_path / "empty", "README.md")], 280)
