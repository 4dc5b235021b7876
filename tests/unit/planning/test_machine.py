"""`camshaft doctor` finds staged faults of a machine, and its fixes mend them."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.command_line import ROOT

import camshaft.machine
from camshaft.machine import describe_contention
from camshaft.planning.doctor import imports
from camshaft.planning.doctor.findings import Finding, collect, fail, ok, report, warn, worst
from camshaft.planning.doctor.imports import _shadowing_files
from camshaft.planning.doctor.machine import check_driver, check_network

CAMSHAFT = f"{sys.executable} -m camshaft"
IN_NAMESPACE = ["unshare", "--mount", "sh", "-ec"]


def can_mount() -> bool:
    command = [*IN_NAMESPACE, "mount -t tmpfs tmpfs /mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except FileNotFoundError:
        return False


needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs mount namespaces")


def doctor(folder: Path, before: str = "", shell: tuple[str, ...] = ("sh", "-ec"), **variables: str) -> dict[str, Any]:
    """Run `camshaft doctor --json` in a folder after some shell commands, and return its findings by check."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    script = f"{before}\ncd {folder}\n{CAMSHAFT} doctor --json || [ $? = 1 ]"
    run = subprocess.run([*shell, script], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    findings = json.loads(run.stdout)["findings"]
    return {check: max((f for f in findings if f["check"] == check), key=severity) for check in names(findings)}


def names(findings: list[dict[str, str]]) -> set[str]:
    return {finding["check"] for finding in findings}


def severity(finding: dict[str, str]) -> int:
    return ["OK", "WARN", "FAIL"].index(finding["status"])


def command(finding: dict[str, str]) -> str:
    """Return the first command of a fix."""
    return finding["fix"].partition(", or ")[0]


def processor_seconds() -> float:
    """Return the time that finished child processes have computed, which does not depend on other programs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_sound_machine_has_no_failure_within_a_second(tmp_path: Path) -> None:
    start = processor_seconds()
    findings = doctor(tmp_path)
    assert {name for name, finding in findings.items() if finding["status"] == "FAIL"} == set()
    assert processor_seconds() - start < 1
    assert set(findings) >= {"python", "packages", "cpu", "memory", "shared memory", "disk", "run folder", "limits"}


@needs_mounts
def test_small_shared_memory_is_found_and_mended(tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    finding = doctor(tmp_path, mount, (*IN_NAMESPACE,))["shared memory"]
    assert finding["status"] == "FAIL"
    assert "64 MiB" in finding["message"]
    mended = doctor(tmp_path, f"{mount}\n{command(finding)}", (*IN_NAMESPACE,))["shared memory"]
    assert mended["status"] == "OK"


@needs_mounts
def test_full_disk_is_found(tmp_path: Path) -> None:
    finding = doctor(tmp_path, f"mount -t tmpfs -o size=64m tmpfs {tmp_path}", (*IN_NAMESPACE,))["disk"]
    assert finding["status"] == "FAIL"
    assert "run folder" in finding["message"]


@needs_mounts
def test_read_only_run_folder_is_found(tmp_path: Path) -> None:
    finding = doctor(tmp_path, f"mount -t tmpfs -o ro tmpfs {tmp_path}", (*IN_NAMESPACE,))["run folder"]
    assert finding["status"] == "FAIL"
    assert "Read-only file system" in finding["message"]


def test_too_many_threads_are_found_and_mended(tmp_path: Path) -> None:
    finding = doctor(tmp_path, OMP_NUM_THREADS="4096")["cpu"]
    assert finding["status"] == "WARN"
    mended = doctor(tmp_path, command(finding), OMP_NUM_THREADS="4096")["cpu"]
    assert "OMP_NUM_THREADS=" not in mended["message"]  # it may be busy with other programs


@pytest.mark.parametrize(
    ("threads", "load", "machine", "fix"),
    [
        ("", 1.5, 4, None),
        ("", 3.0, 4, "set OMP_NUM_THREADS=2"),
        ("4", 9.0, 4, "set OMP_NUM_THREADS=1"),
        ("1", 9.0, 4, None),
        ("", 9.0, 64, None),
    ],
)
def test_cores_of_other_programs_are_reported(
    threads: str, load: float, machine: int, fix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    found = describe_contention(ranks=1)
    assert (None if found is None else found[1].partition(",")[0]) == fix


def test_low_limit_of_files_is_found_and_mended(tmp_path: Path) -> None:
    finding = doctor(tmp_path, "ulimit -S -n 128")["limits"]
    assert finding["status"] == "FAIL"
    assert "128 files" in finding["message"]
    fix = (
        command(finding).replace("ulimit", "ulimit -S").replace("65536", "4096")
    )  # below the hard limit of any machine
    assert doctor(tmp_path, f"ulimit -S -n 128; {fix}")["limits"]["status"] == "OK"


def test_shadowing_file_is_found_and_mended(tmp_path: Path) -> None:
    before, inside = tmp_path / "before", tmp_path / "inside"
    for folder in (before, inside):
        folder.mkdir()
        (folder / "yaml.py").write_text("raise AssertionError", encoding="utf-8")
    path = f"{before}{os.pathsep}{ROOT}"
    finding = doctor(tmp_path, PYTHONPATH=path)["imports"]
    assert finding["status"] == "FAIL"
    assert str(before / "yaml.py") in finding["message"]
    assert doctor(tmp_path, command(finding), PYTHONPATH=path)["imports"]["status"] == "OK"
    ignored = doctor(inside)["imports"]
    assert ignored["status"] == "WARN"
    assert "camshaft ignores" in ignored["message"]


@pytest.mark.parametrize("name", ["PyYAML", "pyyaml"])
def test_packages_of_a_target_folder_are_not_shadowing(name: str, tmp_path: Path) -> None:
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "__init__.py").touch()
    names = {"yaml": "pyyaml"}
    assert list(_shadowing_files(tmp_path, names)) == [tmp_path / "yaml"]
    metadata = tmp_path / f"{name}-6.0.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: PyYAML\nVersion: 6.0.2\n", encoding="utf-8")
    assert list(_shadowing_files(tmp_path, names)) == []


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": 16, "memory.current": 12, "memory.stat": 3},
        {"memory/memory.limit_in_bytes": 16, "memory/memory.usage_in_bytes": 12, "memory/memory.stat": 3},
    ],
)
def test_memory_in_use_by_the_container_is_not_available(
    files: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 of the 12 MiB in use are cached files, which the kernel drops when it needs memory."""
    texts = {name: str(count << 20) for name, count in files.items()}
    for name in texts:
        if name.endswith("stat"):
            texts[name] = f"anon 1\n{'total_' * ('/' in name)}inactive_file {texts[name]}"
    monkeypatch.setattr(camshaft.machine, "cgroup_file", texts.get)
    assert camshaft.machine.available_memory() == 7 << 20


@pytest.mark.parametrize(("version", "status"), [("2.5.0", "FAIL"), ("2.12.1+cpu", "OK")])
def test_wrong_torch_version_is_found(version: str, status: str, tmp_path: Path) -> None:
    metadata = tmp_path / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n", encoding="utf-8")
    finding = doctor(tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")["packages"]
    assert finding["status"] == status
    assert f"torch {version}" in finding["message"]
    assert ("pip install 'torch<" in str(finding["fix"])) == (status == "FAIL")


def test_proxy_without_exception_is_found_without_its_password() -> None:
    environment = {"http_proxy": "http://me:secret@proxy:3128"}
    findings = list(check_network(environment))
    assert findings[0].status == "WARN"
    assert "secret" not in report(findings)
    assert all(
        f.status == "OK" for f in check_network({**environment, "NO_PROXY": "localhost"}) if "proxy" in f.message
    )


def test_missing_network_interface_is_found() -> None:
    finding, *_ = check_network({"NCCL_SOCKET_IFNAME": "ib7"})
    assert (finding.status, finding.fix) == ("FAIL", "unset NCCL_SOCKET_IFNAME")
    assert not [f for f in check_network({"NCCL_SOCKET_IFNAME": "^docker,lo"}) if f.status == "FAIL"]


@pytest.mark.parametrize(
    ("files", "status", "part"),
    [
        ((), "OK", "no NVIDIA driver"),
        (("dev/nvidia0",), "FAIL", "no NVIDIA driver is loaded"),
        (("proc/driver/nvidia/version",), "FAIL", "no device files"),
        (("proc/driver/nvidia/version", "dev/nvidia0", "dev/nvidia1"), "OK", "driver 570.86.15, 2 devices"),
    ],
)
def test_driver_files_are_compared(files: tuple[str, ...], status: str, part: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Release Build\n")
    finding, *_ = check_driver(tmp_path)
    assert finding.status == status
    assert part in finding.message


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.13.0+cpu", "<2.14,>=2.11", True),
        ("2.14.0", "<2.14,>=2.11", False),
        ("2.9", ">=2.11", False),
        ("3", ">=3.0.0", True),
        ("0.9.1", "<0.10,>=0.9", True),
        ("1.10", ">=1.9", True),
        ("1.4.2", "~=1.4", True),
        ("2.0", "~=1.4", False),
    ],
)
def test_versions_are_compared_as_numbers(
    version: str, specifier: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "package_version", lambda _: version)
    problems = list(imports._problems(Requirement(f"torch{specifier}"), "packages", optional=False))
    assert (problems == []) is expected


def test_a_check_that_hangs_is_a_finding() -> None:
    def hang() -> list[Finding]:
        time.sleep(600)
        return []

    findings = collect({"slow": hang, "fast": lambda: [ok("fast", "done")]}, seconds=0.3)
    assert [(f.check, f.status) for f in findings] == [("slow", "FAIL"), ("fast", "OK")]


def test_a_bug_in_a_check_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        collect({"broken": lambda: [ok("broken", str(1 / 0))]}, seconds=30)


def test_the_worst_finding_is_the_result() -> None:
    findings = [ok("a", "fine"), warn("b", "slow", "fix it"), fail("c", "broken", "mend it")]
    assert [worst(findings[:count]) for count in range(4)] == ["OK", "OK", "WARN", "FAIL"]
    assert report(findings).splitlines()[1:3] == ["WARN b  slow", "        fix: fix it"]
