"""Version, citation, changelog and Dockerfile agree with the project."""

import datetime
import re
import tomllib
from pathlib import Path

import yaml

from camshaft import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]

CITATION_REQUIRED = {"authors", "cff-version", "message", "title"}
"""Required keys of schema 1.2.0 of the citation file format."""

CITATION_OPTIONAL = {"abstract", "date-released", "keywords", "license", "type", "version"}
"""Optional keys of the schema that this project uses."""

SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
"""Sections of a release in keepachangelog.com 1.1.0."""


def test_citation_follows_its_schema() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert set(citation) >= CITATION_REQUIRED
    assert set(citation) <= CITATION_REQUIRED | CITATION_OPTIONAL
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in ("software", "dataset")
    assert citation["authors"]
    assert all(set(author) == {"name"} for author in citation["authors"])
    assert citation["license"] == PROJECT["license"]
    assert citation["version"] == __version__  # also a string: unquoted 1.0 is a number
    assert isinstance(citation["date-released"], datetime.date)
    assert len(citation["keywords"]) == len(set(citation["keywords"]))


def test_version_has_one_source() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def releases() -> dict[str, str]:
    """Return the body of each release of the changelog, newest first, under its heading."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_changelog_lists_releases_from_new_to_old() -> None:
    headings = [heading for heading in releases() if heading != "[Unreleased]"]
    matches = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d{2}-\d{2})", heading) for heading in headings]
    versions = [tuple(map(int, match.groups()[:3])) for match in matches if match]
    dates = [datetime.date.fromisoformat(match[4]) for match in matches if match]
    assert len(versions) == len(headings)
    assert headings[-1].startswith("[0.1.0]")
    assert versions == sorted(set(versions), reverse=True)
    assert dates == sorted(dates, reverse=True)
    assert ".".join(map(str, versions[0])) == __version__
    assert list(releases())[1:].count("[Unreleased]") == 0, "unreleased changes come first"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert dates[0] == citation["date-released"]


def test_changelog_uses_the_sections_of_keep_a_changelog() -> None:
    for heading, body in releases().items():
        sections = re.findall(r"^### (.+)$", body, flags=re.MULTILINE)
        assert sections, heading
        assert set(sections) <= SECTIONS, heading
        assert len(sections) == len(set(sections)), heading


def dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines) if word]


def test_dockerfile_copies_files_that_the_build_context_has() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    for _, arguments in (line for line in dockerfile() if line[0] == "COPY"):
        *sources, _target = [word for word in arguments.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source in allowed, source


def test_dockerfile_installs_extras_of_the_project() -> None:
    installs = [arguments for word, arguments in dockerfile() if word == "RUN" and "pip install" in arguments]
    (extras,) = re.findall(r"/src\[([a-z,-]+)\]", " ".join(installs))
    assert set(extras.split(",")) <= set(EXTRAS)
    assert "vllm" in extras
    requirements = {name for extra in extras.split(",") for name in EXTRAS[extra]}
    for requirement in re.findall(r'"((?:vllm|ray|peft)\S*)"', " ".join(installs)):
        assert requirement in requirements, requirement
    assert all("--no-cache-dir" in arguments for arguments in installs)


def test_image_runs_without_root_and_without_secrets() -> None:
    instructions = dockerfile()
    assert instructions[0][0] == "FROM"
    assert re.search(r":\d+\.\d+\.\d+-", instructions[0][1]), "the base image has a fixed version"
    users = [arguments for word, arguments in instructions if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    assert not {word for word, _ in instructions} & {"ADD", "ARG"}
    settings = " ".join(arguments for word, arguments in instructions if word == "ENV")
    assert not re.search("KEY|TOKEN|SECRET|PASSWORD", settings)
