"""Every command of the README runs, in order, in an empty folder."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.timeout(300)
def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    script = ["set -e", f'camshaft() {{ {shlex.quote(sys.executable)} -m camshaft "$@"; }}']
    script.append(f'python3() {{ {shlex.quote(sys.executable)} "$@"; }}')
    for language, text in blocks():
        if any(command in text for command in MAKE) or "git clone" in text:
            continue
        if language == "python":
            name = f"block{len(script)}.py"
            (tmp_path / name).write_text(text, encoding="utf-8")
            text = f"python3 {name}"
        script.append(text)
    assert len(script) > 5, "the README has too few commands"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "all.sh").write_text("\n".join(script), encoding="utf-8")
    process = subprocess.run(["bash", "all.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
    run = tmp_path / "checkpoints" / "example_sums" / "tiny"
    promised = ("metrics.jsonl", "validation/step_4.jsonl", "global_step_4/actor/model/model.safetensors")
    assert all((run / name).exists() for name in promised), sorted(str(path) for path in run.rglob("*"))


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
