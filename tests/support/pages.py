"""Read and run the code blocks of documentation pages.

    blocks(page)                                # every fenced block, with its language and line
    lines = script(folder, page)                # the shell lines of the blocks that run
    run_here(commands(folder, lines), ...)      # run them in this process

A block of the language `bash` or `python` runs in a test. A Python block whose first line is a comment with a file name
is written to that file. Any other Python block is a script. Blocks of other languages, such as `text`, do not run.
"""

import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from support.command_line import camshaft

ROOT = Path(__file__).parents[2]
RUNNABLE = ("bash", "python")
PROGRAMS = ("camshaft", "python3", "python")
TESTED_ELSEWHERE = ("git", "make", "pip")
"""Programs whose lines `script` leaves out. Tests check the targets of the Makefile and the extras of the project."""

_FENCE = re.compile(r"^( *)```([a-z]*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")


class Block(NamedTuple):
    """A fenced code block of a page."""

    language: str
    text: str
    line: int


def pages() -> list[Path]:
    """Return the README, the guide for contributors and every page of docs, relative to the repository."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT) for path in paths]


def blocks(page: Path | str) -> list[Block]:
    """Return the code blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(match[2], match[3], text.count("\n", 0, match.start()) + 1) for match in _FENCE.finditer(text)]


def script(folder: Path, page: Path | str) -> list[str]:
    """Return the shell lines of the runnable blocks of a page, for `bash` or `commands` in `folder`."""
    (folder / "examples").symlink_to(ROOT / "examples")
    lines = []
    for number, block in enumerate(blocks(page)):
        if block.language == "bash":
            lines += [line for line in _joined(block.text) if line.split(" ")[0] not in TESTED_ELSEWHERE]
        elif block.language == "python" and (name := _FILE.match(block.text)):
            lines.append(f"cat > {name[1]} <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK\n")
        elif block.language == "python":
            (folder / f"block{number}.py").write_text(block.text, encoding="utf-8")
            lines.append(f"python3 block{number}.py")
    return lines


def _joined(text: str) -> list[str]:
    """Return the lines of a bash block, with continued lines as one."""
    return text.replace("\\\n", " ").splitlines()


def bash(folder: Path, lines: Sequence[str], timeout: float) -> str:
    """Run shell lines in `folder` up to the first one that fails, and return the output."""
    (folder / "all.sh").write_text("\n".join(["set -e", *lines]), encoding="utf-8")
    process = subprocess.run(["bash", "all.sh"], cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    return process.stdout


def commands(folder: Path, lines: Sequence[str]) -> list[list[str]]:
    """Return the words of every command of `PROGRAMS` in the lines, as bash splits them; other commands run."""
    record = [f"{name}() {{ printf '%s\\0' {name} \"$@\" end >> words; }}" for name in PROGRAMS]
    bash(folder, [*record, *lines], 20)
    words = (folder / "words").read_text(encoding="utf-8").split("\0")[:-1]
    ends = [position for position, word in enumerate(words) if word == "end"]
    return [words[start + 1 : end] for start, end in zip([-1, *ends], ends, strict=False)]


def run_here(
    words: Iterable[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    shorten: Callable[[list[str]], list[str]] = lambda args: args,
) -> list[str]:
    """Run commands in this process, in the working directory, and return the standard output of each."""
    outputs = []
    for program, *args in words:
        if program != "camshaft":
            monkeypatch.setattr(sys, "argv", args)
            try:
                runpy.run_path(args[0], run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise
            continue
        run = camshaft(*shorten(args))
        assert run.status == 0, f"{args}: {run.err[-3000:]}"
        outputs.append(run.out)
    return outputs
