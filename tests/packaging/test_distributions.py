"""The sdist and the wheel hold what an installed camshaft needs, and nothing else."""

import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest
from support.builds import build, build_wheel_from, copy_sources

from camshaft import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SDIST_FOLDERS = {"camshaft", "camshaft.egg-info", "docs", "examples"}


def package_files() -> set[str]:
    """Return the files of the package in this repository, relative to its root."""
    paths = (path for path in (ROOT / "camshaft").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in paths}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", copy_sources(tmp_path_factory.mktemp("copy")), tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the unpacked sdist as pip does."""
    return build_wheel_from(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_file_of_the_package_and_no_other(wheel_files: set[str]) -> None:
    in_package = {name for name in wheel_files if name.startswith("camshaft/")}
    assert in_package == package_files()
    assert "camshaft/py.typed" in in_package
    folders = {PurePosixPath(name).parts[0] for name in wheel_files}
    assert folders == {"camshaft", f"camshaft-{__version__}.dist-info"}
    assert f"camshaft-{__version__}.dist-info/licenses/LICENSE" in wheel_files


def test_metadata_of_the_wheel_is_that_of_the_project(wheel: Path) -> None:
    archive, folder = zipfile.ZipFile(wheel), f"camshaft-{__version__}.dist-info"
    metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(core) == len(PROJECT["dependencies"])
    assert f"camshaft = {PROJECT['scripts']['camshaft']}" in archive.read(f"{folder}/entry_points.txt").decode()


def test_sdist_holds_docs_and_examples_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in archive.getnames()}
    assert {name.parts[0] for name in names if len(name.parts) > 1} == SDIST_FOLDERS
    files = {str(name) for name in names}
    assert package_files() <= files
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "examples/arithmetic/demo.py"} <= files
    assert not any("__pycache__" in name.parts for name in names)
