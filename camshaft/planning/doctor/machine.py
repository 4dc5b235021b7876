"""Checks of this machine that take a second and need no package: cores, memory, disks, driver, limits, variables.

findings = collect(machine_checks(Path("checkpoints")), seconds=5.0)
"""

import fcntl
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path

from camshaft.machine import (
    available_memory,
    cgroup_file,
    cgroup_memory,
    describe_contention,
    memory_facts,
    omp_threads,
)
from camshaft.planning.doctor.findings import Check, Finding, fail, ok, warn
from camshaft.planning.doctor.imports import (
    check_optional_packages,
    check_packages,
    check_python,
    check_shadowing,
    check_tinker_sdk,
    package_version,
)
from camshaft.subprocesses import start_thread

GIB = 2**30
MIN_SHARED_MEMORY = GIB
"""Size of /dev/shm below which NCCL, vLLM and the weight sync can fail. A bucket of the weight sync has 512 MiB."""
MIN_DISK, LOW_DISK = GIB, 20 * GIB
"""Free space without which nothing can be saved, and free space that is little for checkpoints."""
MIN_FILES, LOW_FILES = 256, 1024
"""Limits of open files at which a run fails or may fail."""
LOW_PROCESSES = 1024
MIN_MEMORY = 2 * GIB
NAME_SECONDS = 0.5
"""Time limit for the host name to resolve."""


def machine_checks(folder: Path) -> dict[str, Check]:
    """Return all checks of this machine. `folder` is the folder of runs."""
    return {
        "python": check_python,
        "packages": check_packages,
        "optional": check_optional_packages,
        "tinker sdk": check_tinker_sdk,
        "imports": check_shadowing,
        "cpu": check_cpu,
        "memory": check_memory,
        "shared memory": check_shared_memory,
        "disk": partial(check_disks, folder),
        "run folder": partial(check_folder, folder),
        "driver": check_driver,
        "limits": check_limits,
        "network": check_network,
        "hub": check_hub,
    }


# -- cores and memory -----------------------------------------------------------------------------


def check_cpu(ranks: int = 1) -> Iterator[Finding]:
    """Compare the number of threads of `ranks` processes with the number of cores."""
    cores, share = len(os.sched_getaffinity(0)), _cgroup_cores()
    available = cores if share is None else min(cores, share)
    limited = f", of which this container may use {share:g}" if share is not None and share < cores else ""
    text = os.environ.get("OMP_NUM_THREADS", "")
    threads = omp_threads(text)
    if threads * ranks > available:
        total = f"{ranks} ranks have {threads * ranks} threads" if ranks > 1 else f"a process has {threads} threads"
        message = f"OMP_NUM_THREADS={threads}: {total} on {available:g} cores, which then wait for each other"
        yield warn("cpu", message, "unset OMP_NUM_THREADS")
    elif problem := describe_contention(ranks):
        yield warn("cpu", *problem)
    else:
        yield ok("cpu", f"{cores} cores{limited}; OMP_NUM_THREADS {'is ' + text if text else 'is not set'}")


def check_memory() -> Iterator[Finding]:
    """Report the memory of the machine and the limit of the container."""
    facts = memory_facts()
    total, available, limit = facts["MemTotal"], available_memory(), cgroup_memory()
    note = ""
    if limit is not None and limit < total:
        note = f"; the container is limited to {_size(limit)}, and processes above the limit are killed"
    message = f"{_size(available)} of {_size(total)} available{note}"
    if available < MIN_MEMORY:
        yield warn("memory", message, "ps -eo pid,rss,args --sort=-rss | head")
    else:
        yield ok("memory", message)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Check the size of /dev/shm, through which processes exchange weights and batches."""
    fix = "mount -o remount,size=8G /dev/shm, or start the container with --shm-size=8g"
    if not path.is_dir() or not os.access(path, os.W_OK):
        yield fail("shared memory", f"{path} is missing or not writable", fix)
        return
    usage = shutil.disk_usage(path)
    message = f"{path} has {_size(usage.free)} of {_size(usage.total)} free"
    if usage.total < MIN_SHARED_MEMORY:
        yield fail("shared memory", f"{message}, and runs with several processes need {_size(MIN_SHARED_MEMORY)}", fix)
    elif usage.free < MIN_SHARED_MEMORY:
        yield warn("shared memory", f"{message}, which other processes use", f"ls -lS {path} | head")
    else:
        yield ok("shared memory", message)


def _cgroup_cores() -> float | None:
    """Return the number of cores that the container may use, or None."""
    quota, _, period = (cgroup_file("cpu.max") or "").partition(" ")
    if not quota:
        quota, period = cgroup_file("cpu/cpu.cfs_quota_us") or "", cgroup_file("cpu/cpu.cfs_period_us") or ""
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


# -- disks ----------------------------------------------------------------------------------------


def check_disks(folder: Path) -> Iterator[Finding]:
    """Check the free space of the disks of the run folder, of the hub cache and of temporary files."""
    places = {"run folder": folder, "hub cache": hub_cache(), "temporary folder": Path(tempfile.gettempdir())}
    for name, place in places.items():
        existing = existing_parent(place)
        free = shutil.disk_usage(existing).free
        message = f"{name} {place}: {_size(free)} free"
        fix = f"du -xh --max-depth=2 {existing} | sort -h | tail"
        if free < MIN_DISK:
            yield fail("disk", f"{message}, which is too little for any checkpoint or model", fix)
        elif free < LOW_DISK:
            yield warn("disk", f"{message}; a checkpoint of a 1B model has 12 GiB", fix)
        else:
            yield ok("disk", message)


def check_folder(folder: Path) -> Iterator[Finding]:
    """Check that files can be written, synchronized and locked in the folder of a run."""
    existing = existing_parent(folder)
    fix = f"chmod u+rwx {existing}, or set trainer.default_local_dir=FOLDER"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        yield fail("run folder", f"{existing} cannot be written and locked: {error.strerror}", fix)
        return
    yield ok("run folder", f"{existing} can be written and locked")


def existing_parent(path: Path) -> Path:
    """Return the path, or its first parent that exists."""
    path = path.expanduser().absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def hub_cache() -> Path:
    """Return the folder of the Hugging Face cache, without importing its library."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def check_hub() -> Iterator[Finding]:
    """Report the models in the Hugging Face cache, and whether models can be downloaded."""
    cache = hub_cache()
    count = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    note = "HF_HUB_OFFLINE is set, so nothing is downloaded" if offline else "downloads are allowed"
    yield ok("hub", f"{count} models in {cache}; {note}")


# -- devices --------------------------------------------------------------------------------------


def check_driver(root: Path = Path("/")) -> Iterator[Finding]:
    """Compare the NVIDIA driver, the device files and the build of torch."""
    version = root / "proc/driver/nvidia/version"
    devices = sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))
    if not version.exists() and not devices:
        yield ok("driver", "no NVIDIA driver: runs use the CPU (trainer.device=cpu)")
    elif not version.exists():
        yield fail("driver", f"device files {', '.join(devices)} exist, but no NVIDIA driver is loaded", "nvidia-smi")
    elif not devices:
        fix = "start the container with --gpus all, or nvidia-modprobe -c 0 on the machine itself"
        yield fail("driver", "the NVIDIA driver is loaded, but there are no device files /dev/nvidia*", fix)
    else:
        first = version.read_text(encoding="utf-8").splitlines()[0]
        number = next((word for word in first.split() if word[0].isdigit() and "." in word), "unknown")
        yield ok("driver", f"NVIDIA driver {number}, {len(devices)} devices")
        torch = package_version("torch") or ""
        if torch.endswith("+cpu"):
            fix = f"pip install --force-reinstall torch=={torch.partition('+')[0]}"
            yield fail("driver", f"torch {torch} is a build for CPUs, so no run uses the GPU", fix)


# -- limits and variables -------------------------------------------------------------------------


def check_limits() -> Sequence[Finding]:
    """Check the limits of open files, processes and file sizes."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    problems: list[Finding] = []
    if 0 <= files < LOW_FILES:
        level = fail if files < MIN_FILES else warn
        message = f"a process can open {files} files, and a run may need {LOW_FILES}"
        problems.append(level("limits", message, "ulimit -n 65536"))
    if 0 <= processes < LOW_PROCESSES:
        message = f"this user can start {processes} processes and threads"
        problems.append(warn("limits", message, "ulimit -u unlimited"))
    if size != resource.RLIM_INFINITY:
        problems.append(warn("limits", f"files are limited to {_size(size)} (ulimit -f)", "ulimit -f unlimited"))
    return problems or [ok("limits", f"{_limit(files)} open files, {_limit(processes)} processes")]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_network(environment: Mapping[str, str] = os.environ) -> Sequence[Finding]:
    """Check proxies, the host name, and the network interface that environment variables name."""
    problems: list[Finding] = []
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environment.get(name)]
    direct = f"{environment.get('no_proxy', '')},{environment.get('NO_PROXY', '')}"
    if proxies and not {"127.0.0.1", "localhost", "*"} & {host.strip() for host in direct.split(",")}:
        names = " and ".join(proxies)
        message = f"{names} is set without an exception for this machine, but a run connects to its own servers"
        fix = "export NO_PROXY=localhost,127.0.0.1 no_proxy=localhost,127.0.0.1"
        problems.append(warn("network", message, fix))
    interfaces = sorted(path.name for path in Path("/sys/class/net").glob("*"))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if (missing := _missing_interface(environment.get(name, ""), interfaces)) is not None:
            message = f"{name}={missing} names no interface of {', '.join(interfaces)}"
            problems.append(fail("network", message, f"unset {name}"))
    host = socket.gethostname()
    if not _resolves(host):
        message = f"the host name {host} does not resolve within {NAME_SECONDS:g} s; ranks wait for it when they start"
        problems.append(warn("network", message, f"echo '127.0.0.1 {host}' >> /etc/hosts"))
    return problems or [ok("network", f"host {host}, interfaces {', '.join(interfaces)}")]


def _missing_interface(value: str, interfaces: list[str]) -> str | None:
    """Return the value if it selects none of the interfaces. NCCL accepts prefixes, exclusions (^) and names (=)."""
    names = [name for name in value.removeprefix("=").split(",") if name]
    if not names or value.startswith("^"):
        return None
    return None if any(interface.startswith(name) for name in names for interface in interfaces) else value


def _resolves(host: str) -> bool:
    lookup = start_thread(partial(socket.getaddrinfo, host, None), "host name")
    futures.wait([lookup], NAME_SECONDS)
    return lookup.done() and lookup.exception() is None
