"""Find the Ray cluster that a run joins, and check that its head answers.

A run joins the cluster at `ray_init.address` or, if that is unset, at RAY_ADDRESS. Otherwise it joins a cluster that
this user has started on this machine, or starts one. Ray records the address of a cluster in a folder that all users
can write to, so a record of another user is an error: the cluster would run the code of this run.
"""

import grp
import os
import pwd
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from camshaft.controller.network import accepts_connections
from camshaft.errors import ConfigError
from camshaft.subprocesses import POLL_SECONDS, Limit, Wait, kill_group, start_python

HEAD_SECONDS = 30.0
"""Time limit for the head of a cluster to answer."""
_PROBE = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
"""Program that requests the ID of a cluster. Ray itself waits for ever for a head that accepts connections only."""


class Cluster(NamedTuple):
    """A cluster to join, or to start if the address is None or "local"."""

    address: str | None
    source: str = ""
    """Setting or file that contains the address."""

    @property
    def starts(self) -> bool:
        return self.address in (None, "local")


def find_cluster(ray_init: Mapping[str, Any]) -> Cluster:
    """Return the cluster of a run. Raise `ConfigError` if the only address is in a file that others could write."""
    settings = {
        "ray_kwargs.ray_init.address": ray_init.get("address"),
        "RAY_ADDRESS in the environment": os.environ.get("RAY_ADDRESS"),
    }
    source, address = next(((name, value) for name, value in settings.items() if value), ("", None))
    if address not in (None, "auto"):
        return Cluster(address, source)
    cluster = _local_cluster()
    if address == "auto" and cluster.starts:
        raise ConfigError(
            f"{source} is auto, but no Ray cluster runs on this machine; start one (`ray start --head`), or remove "
            "the setting to let the run start one"
        )
    return cluster


def _local_cluster() -> Cluster:
    """Return the cluster that runs on this machine. Its address is None if there is none or it does not answer."""
    file = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    try:
        status = file.lstat()  # if there is no file, the folder names no cluster
        for facts in (file.parent.lstat(), file.parent.stat()):  # the folder may be a link of its owner
            _check_trusted(file.parent, facts, is_folder=True)
        _check_trusted(file, status)
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return Cluster(None)
    with open(descriptor, encoding="utf-8", errors="replace") as content:
        status = os.fstat(descriptor)
        _check_trusted(file, status)  # it may have been replaced
        address = content.read().strip()
    return Cluster(address, f"the file {file} of {_owner(status)}") if head_may_answer(address) else Cluster(None)


def _check_trusted(path: Path, status: os.stat_result, is_folder: bool = False) -> None:
    """Raise `ConfigError` unless the file or its folder belongs to this user or root, and only they write to the file.

    Ray lets all users write to the folder. A file that another user puts there belongs to that user.
    """
    owner, mode = _owner(status), status.st_mode
    if not (stat.S_ISREG(mode) or (is_folder and (stat.S_ISDIR(mode) or stat.S_ISLNK(mode)))):
        reason = f"it is a link or a device of {owner}"
    elif status.st_uid not in (os.getuid(), 0):
        reason = f"it belongs to {owner}"
    elif not is_folder and _others_may_write(status):
        reason = f"users other than its owner, {owner}, may write to it"
    else:
        return
    raise ConfigError(
        f"{path}, which names the Ray cluster of this machine, cannot be trusted: {reason}. To join a cluster, set its "
        "address (+ray_kwargs.ray_init.address=HOST:PORT, or RAY_ADDRESS). To start one, remove it "
        "or set RAY_TMPDIR to a folder of your own"
    )


def _others_may_write(status: os.stat_result) -> bool:
    """Return True if other users than the owner may write to a file. A group that is named after the owner is private.

    With such groups, the default permissions of new files on many systems include the group.
    """
    try:
        has_private_group = grp.getgrgid(status.st_gid).gr_name == pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        has_private_group = False
    return bool(status.st_mode & (stat.S_IWOTH if has_private_group else stat.S_IWOTH | stat.S_IWGRP))


def _owner(status: os.stat_result) -> str:
    try:
        return f"user {pwd.getpwuid(status.st_uid).pw_name}"
    except KeyError:  # the user exists on another machine or outside of a container
        return f"user {status.st_uid}"


def head_may_answer(address: str | None) -> bool:
    """Return False if the address contains a port that does not accept connections."""
    host, _, port = (address or "").rpartition(":")
    return not port.isdigit() or accepts_connections(host.strip("[]"), int(port))


def check_head(cluster: Cluster) -> None:
    """Raise `ConfigError` unless the head of a cluster answers. Ray itself would retry for minutes or for ever."""
    address, deadline = cluster.address, time.monotonic() + HEAD_SECONDS
    if address is None or cluster.starts:
        return
    if "://" in address:
        raise ConfigError(
            f"the address of the Ray cluster is {address}, but a run must join a cluster from one of its machines, at "
            "<host>:<port>; set that address, or start the run with `ray job submit -- camshaft ppo ...`"
        )
    while time.monotonic() < deadline:
        if head_may_answer(address) and _answers(address, deadline):
            return
        time.sleep(POLL_SECONDS)
    raise ConfigError(
        f"no Ray cluster answers at {address} ({cluster.source}) within {HEAD_SECONDS:g} s. Is its head running "
        "(`ray start --head`), and is the port open?"
    )


def _answers(address: str, deadline: float) -> bool:
    """Return False if the head accepts connections, but does not answer a request before the deadline.

    The request is sent by a process that can be killed. `ray.init` reports all other errors of the request.
    """
    silent = subprocess.DEVNULL
    process = start_python(["-c", _PROBE, address], stdin=silent, stdout=silent, stderr=silent)
    wait = Wait("ray.init", ConfigError, Limit(HEAD_SECONDS + 1, f"{HEAD_SECONDS:g} s"))
    try:
        while process.poll() is None and time.monotonic() < deadline:
            wait.check(lambda: f"the Ray cluster at {address}")
            time.sleep(0.05)
        return process.returncode is not None
    finally:
        kill_group(process.pid)
        process.wait()
