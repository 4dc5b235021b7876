"""Checks that start processes: torch, communication, kernels, Ray, reward functions and optional libraries.

    findings = collect(deep_checks(seconds=25.0), seconds=30.0)

Each check runs a program of `probes.py` in a child process, so a driver or a library that hangs or crashes is a
finding. All processes of a check are killed at its end.
"""

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from camshaft.planning.doctor.findings import Check, Finding, fail, ok
from camshaft.plugins import install_command
from camshaft.subprocesses import describe_exit, import_path, kill_group, start_python


class Probe(NamedTuple):
    """A program of `probes.py`, and the command that helps if it fails."""

    fix: str
    library: str = ""
    """Module without which the program does not run."""
    needs_driver: bool = False
    """True if the program runs only on machines with an NVIDIA driver."""


PROBES = {
    "torch": Probe("pip install --force-reinstall 'torch>=2.11,<3'", "torch"),
    "ranks": Probe("export GLOO_SOCKET_IFNAME=lo, and see `camshaft doctor`", "torch"),
    "shared memory": Probe("mount -o remount,size=8G /dev/shm, or start the container with --shm-size=8g"),
    "reward": Probe("python -c 'import camshaft.rewards.worker'", "torch"),
    "device": Probe("nvidia-smi", "torch", needs_driver=True),
    "nccl": Probe("NCCL_DEBUG=INFO camshaft doctor --deep", "torch", needs_driver=True),
    "compile": Probe("pip install --force-reinstall triton", "triton", needs_driver=True),
    "ray": Probe("ray stop, and see /tmp/ray/session_latest/logs", "ray"),
    "vllm": Probe(install_command("vllm", "--force-reinstall"), "vllm"),
    "sglang": Probe("pip install --force-reinstall sglang", "sglang"),
    "megatron": Probe("pip install --force-reinstall megatron-core", "megatron"),
    "torchtitan": Probe("pip install --force-reinstall torchtitan==0.3.0", "torchtitan"),
}

_PROBE_SCRIPT = "import sys; from camshaft.planning.doctor.probes import run; run(sys.argv[1], sys.argv[2:])"


def deep_checks(seconds: float) -> dict[str, Check]:
    """Return the checks for what is installed on this machine. Each of them ends within the time limit."""
    has_driver = Path("/proc/driver/nvidia/version").exists()
    names = [name for name, probe in PROBES.items() if _applies(probe, has_driver)]
    checks: dict[str, Check] = {name: partial(run_probe, name, seconds) for name in names}
    if shutil.which("nvidia-smi") is not None:
        checks["nvidia-smi"] = partial(check_driver_tool, seconds)
    return checks


def _applies(probe: Probe, has_driver: bool) -> bool:
    installed = not probe.library or importlib.util.find_spec(probe.library) is not None
    return installed and (has_driver or not probe.needs_driver)


def run_probe(name: str, seconds: float) -> Iterator[Finding]:
    """Run a program of `probes.py` and yield its result."""
    process = start_python(
        ["-c", _PROBE_SCRIPT, name, *import_path()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err, ended = _output(process, seconds)
    if not ended:
        yield fail(name, f"no answer within {seconds:g} s{_last_line(err, ': the last output is ')}", PROBES[name].fix)
    elif process.returncode:
        reason = _last_line(err, "") if process.returncode > 0 else ""
        yield fail(name, reason or f"the process ended with {describe_exit(process.returncode)}", PROBES[name].fix)
    else:
        yield ok(name, _last_line(out, ""))


def check_driver_tool(seconds: float) -> Iterator[Finding]:
    """Ask the NVIDIA driver for the free memory of each device."""
    command = ["nvidia-smi", "--query-gpu=name,memory.free,memory.total", "--format=csv,noheader"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    out, err, ended = _output(process, seconds)
    fix = "restart the machine, or reload the driver with `modprobe -r nvidia && modprobe nvidia`"
    if not ended:
        yield fail("nvidia-smi", f"the driver does not answer within {seconds:g} s", fix)
    elif process.returncode:
        yield fail("nvidia-smi", _last_line(err or out, "") or "nvidia-smi failed", fix)
    else:
        yield ok("nvidia-smi", out.decode(errors="replace").strip())


def _output(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bytes, bool]:
    """Return the output of a process, and False if it was killed at the time limit. Kill its group in any case."""
    try:
        out, err = process.communicate(timeout=seconds)
        return out, err, True
    except subprocess.TimeoutExpired as limit:
        return limit.stdout or b"", limit.stderr or b"", False
    finally:
        kill_group(process.pid)


def _last_line(output: bytes, prefix: str) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return prefix + lines[-1].strip() if lines else ""
