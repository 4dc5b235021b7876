"""`camshaft doctor --deep`: each check is a process with a time limit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import ROOT
from support.processes import marked, still_running
from unit.planning.test_machine import IN_NAMESPACE, needs_mounts

from camshaft.planning.doctor.deep import check_driver_tool, deep_checks, run_probe
from camshaft.plugins import install_command

PROBE = "from camshaft.planning.doctor.deep import run_probe; print([tuple(f) for f in run_probe('shared memory', 60)])"


@pytest.mark.parametrize(
    "name", ["shared memory", "reward", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ranks", "ray"))]
)
def test_a_sound_machine_passes(name: str) -> None:
    (finding,) = run_probe(name, 100)
    assert finding.status == "OK", finding.message


@needs_mounts
def test_a_process_that_is_killed_is_a_finding(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o size=64m tmpfs /dev/shm; {sys.executable} -c "{PROBE}"'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*IN_NAMESPACE, script]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True).stdout
    assert "'FAIL'" in out
    assert "SIGBUS" in out


def test_an_error_is_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so.13 is missing')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = run_probe("vllm", 60)
    assert finding == ("vllm", "FAIL", "ImportError: libcudart.so.13 is missing", finding.fix)
    assert finding.fix == install_command("vllm", "--force-reinstall")


def test_a_driver_tool_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nsleep 600\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("DOCTOR_TEST", mark := str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "nvidia-smi" in deep_checks(1.0)
    (finding,) = check_driver_tool(1.0)
    assert (finding.status, finding.message) == ("FAIL", "the driver does not answer within 1 s")
    assert not still_running([pid for pid in marked(mark) if pid != os.getpid()])


def test_missing_libraries_are_not_checked() -> None:
    checks = deep_checks(1.0)
    assert {"torch", "ranks", "shared memory", "reward"} <= checks.keys()
    assert not {"sglang", "megatron", "torchtitan"} & checks.keys()
