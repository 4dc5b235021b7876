"""Every command of the README runs, in order, in an empty folder: in this process, and as typed in bash."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import camshaft

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(bash|python)\n(.*?)```", re.DOTALL)

MAKE = {"make demo": "examples/arithmetic/demo.py", "make test": "test-main"}
"""Commands of the first lines that other tests cover: the demo runs below in a short form, the tests are these."""


def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_make_targets_of_the_readme_run_tested_commands() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command, what in MAKE.items():
        assert any(command in text for _, text in blocks())
        recipe = makefile.split(f"\n{command.split()[1]}:")[1].split("\n\n")[0]
        assert what in recipe


def script(folder: Path) -> list[str]:
    """Return the shell lines of all blocks. Python blocks are written to files in `folder`."""
    lines = []
    for number, (language, text) in enumerate(blocks()):
        if any(command in text for command in MAKE) or "git clone" in text:
            continue
        if language == "python":
            (folder / f"block{number}.py").write_text(text, encoding="utf-8")
            text = f"python3 block{number}.py"
        lines.append(text)
    assert len(lines) > 5, "the README has too few commands"
    (folder / "examples").symlink_to(ROOT / "examples")
    return lines


def bash(folder: Path, lines: list[str], timeout: float) -> None:
    (folder / "all.sh").write_text("\n".join(["set -e", *lines]), encoding="utf-8")
    process = subprocess.run(["bash", "all.sh"], cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"


def check_promised_files(folder: Path) -> None:
    run = folder / "checkpoints" / "example_sums" / "tiny"
    promised = ("metrics.jsonl", "validation/step_4.jsonl", "global_step_4/actor/model/model.safetensors")
    assert all((run / name).exists() for name in promised), sorted(str(path) for path in run.rglob("*"))


def commands(folder: Path) -> list[list[str]]:
    """Return the words of every command, as bash splits them."""
    record = [f"{name}() {{ printf '%s\\0' {name} \"$@\" end >> words; }}" for name in ("camshaft", "python3")]
    bash(folder, [*record, *script(folder)], 20)
    words = (folder / "words").read_text(encoding="utf-8").split("\0")[:-1]
    ends = [position for position, word in enumerate(words) if word == "end"]
    return [words[start + 1 : end] for start, end in zip([-1, *ends], ends, strict=False)]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fork_server")
def test_every_command_of_the_readme_runs_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for program, *args in commands(tmp_path):
        if program == "python3":
            monkeypatch.setattr(sys, "argv", args)
            runpy.run_path(args[0], run_name="__main__")
            continue
        if args[0] == "check-engine" and "--rule" not in args:
            args += ["--rule", "step"]  # tests/contracts runs all rules
        run = camshaft(*args)
        assert run.status == 0, f"{args}: {run.err}"
    check_promised_files(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_of_the_readme_runs_in_bash(tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    functions = [f'camshaft() {{ {python} -m camshaft "$@"; }}', f'python3() {{ {python} "$@"; }}']
    bash(tmp_path, [*functions, *script(tmp_path)], 280)
    check_promised_files(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_demo_runs_in_a_short_form(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/arithmetic/demo.py"), "--out", "out", "--sft-steps", "3"]
    process = subprocess.run([*command, "--steps", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    assert "held-out sums right" in process.stdout
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    assert len((tmp_path / "out" / "ppo" / "metrics.jsonl").read_text().splitlines()) == 3


LINK = re.compile(r"\]\((?!https?://)([^)#]+)\)")


@pytest.mark.parametrize("page", [p.relative_to(ROOT) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]], ids=str)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not ((ROOT / page).parent / link).exists()]
    assert not missing, missing
