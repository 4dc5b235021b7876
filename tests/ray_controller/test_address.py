"""The cluster that a run joins, and the error without a cluster. These tests start no cluster."""

import contextlib
import grp
import os
import pwd
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray._private import ray_constants

from camshaft.controller import PoolSpec, ray_cluster, ray_environment, start_pools
from camshaft.controller import ray as backend
from camshaft.controller.group import Options
from camshaft.errors import ConfigError

pytestmark = pytest.mark.alone

HERE = [PoolSpec(device="cpu")]


@pytest.fixture(autouse=True)
def _restored_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)  # a started cluster sets it for the whole process


@pytest.fixture
def unused() -> str:
    """Return an address without a listening process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_an_unreachable_cluster_is_an_error_in_bounded_time(
    where: str, unused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "HEAD_SECONDS", 1.0)
    monkeypatch.setenv("RAY_ADDRESS", "" if where == "argument" else unused)
    options = Options(ray_init={"address": unused} if where == "argument" else {})
    start_time = time.monotonic()
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at {unused} .*ray start --head"):
        start_pools(HERE, "ray", options)
    assert time.monotonic() - start_time < 60


def test_daemons_that_do_not_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(backend.ray, "init", fail)
    with pytest.raises(ConfigError, match=r"failed: The current node timed out during startup.*Check ray_kwargs"):
        start_pools(HERE, "ray", Options(ray_init={"address": "local"}))


@pytest.mark.parametrize("dashboard", [False, True])
def test_ray_collects_metrics_for_a_dashboard_only(dashboard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = []

    def fail(**_: object) -> None:
        environments.append(dict(os.environ))
        raise Exception("stop here")

    monkeypatch.setattr(backend.ray, "init", fail)
    for name in ("RAY_AUTH_MODE", ray_environment.SEVERAL_MACHINES):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="stop here"):
        start_pools(HERE, "ray", Options(ray_init={"address": "local", "include_dashboard": dashboard}))
    assert [ray_environment.NO_METRICS.items() <= environment.items() for environment in environments] == [
        not dashboard
    ]
    assert not ray_environment.NO_METRICS.keys() & os.environ.keys(), "the next cluster may have a dashboard"
    assert "RAY_AUTH_MODE" not in os.environ, "Ray has been imported without it"
    assert not ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://head:10001"])
def test_an_api_address_is_rejected_with_a_fix(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=r"<host>:<port>.*ray job submit"):
        start_pools(HERE, "ray")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path at which Ray records the address of a cluster, in a folder that all users can write to."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = tmp_path / "ray"
    folder.mkdir()
    folder.chmod(0o777)  # as Ray does
    return folder / "ray_current_cluster"


class SilentHead:
    """A listener that accepts connections, records what it receives, and never answers."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.num_connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                self.num_connections += 1
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while data := connection.recv(1 << 16):
                self.received.append(data)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def silent_head() -> Iterator[SilentHead]:
    with contextlib.closing(SilentHead()) as head:
        yield head


def test_a_local_cluster_is_found_by_rays_address_file(file: Path, unused: str, silent_head: SilentHead) -> None:
    assert ray_cluster.find_cluster({}).starts
    file.write_text(unused)
    assert ray_cluster.find_cluster({}).starts  # the process has exited
    file.write_text(silent_head.address)
    assert ray_cluster.find_cluster({}).address == silent_head.address
    assert ray_cluster.find_cluster({"address": "auto"}).address == silent_head.address


def test_an_explicit_address_wins_over_any_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("127.0.0.1:1")
    file.chmod(0o666)
    assert ray_cluster.find_cluster({"address": "10.0.0.1:1"}).address == "10.0.0.1:1"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:2")
    assert ray_cluster.find_cluster({}).address == "10.0.0.2:2"


def test_auto_without_a_cluster_is_an_error(file: Path) -> None:
    with pytest.raises(ConfigError, match="is auto, but no Ray cluster runs on this machine"):
        ray_cluster.find_cluster({"address": "auto"})


NOBODY = 65534


def foreign_file(file: Path) -> str:
    os.chown(file, NOBODY, NOBODY)
    return f"{file}, .*it belongs to user "


def foreign_folder(file: Path) -> str:
    os.chown(file.parent, NOBODY, NOBODY)
    return f"{file.parent}, .*it belongs to user "


def writable_file(file: Path) -> str:
    file.chmod(0o646)
    return f"{file}, .*users other than its owner, user .*, may write"


def group_writable_file(file: Path) -> str:
    os.chown(file, -1, NOBODY)
    file.chmod(0o664)
    return f"{file}, .*users other than its owner"


def link(file: Path) -> str:
    file.rename(file.with_name("other"))
    file.symlink_to("other")
    return f"{file}, .*it is a link"


def foreign_link_to_the_folder(file: Path) -> str:
    file.parent.rename(file.parent.with_name("other"))
    file.parent.symlink_to("other")
    os.chown(file.parent, NOBODY, NOBODY, follow_symlinks=False)
    return f"{file.parent}, .*it belongs to user "


@pytest.mark.parametrize("explicit", [None, "auto"])
@pytest.mark.parametrize(
    "spoil", [foreign_file, foreign_folder, writable_file, group_writable_file, link, foreign_link_to_the_folder]
)
def test_a_planted_cluster_file_is_refused_without_connecting(
    spoil: Callable[[Path], str], explicit: str | None, file: Path, silent_head: SilentHead
) -> None:
    if os.getuid() and spoil not in (writable_file, link):
        pytest.skip("only root can give a file to another user")
    file.write_text(silent_head.address)
    message = spoil(file)
    with pytest.raises(ConfigError, match=f"{message}.*RAY_ADDRESS.*RAY_TMPDIR"):
        start_pools(HERE, "ray", Options(ray_init={"address": explicit} if explicit else {}))
    assert not silent_head.num_connections


def test_a_link_of_its_owner_to_the_folder_is_accepted(file: Path, silent_head: SilentHead) -> None:
    """An administrator moves the folder to a larger disk in this way."""
    file.write_text(silent_head.address)
    file.parent.rename(file.parent.with_name("large-disk"))
    file.parent.symlink_to("large-disk")
    assert ray_cluster.find_cluster({}).address == silent_head.address


def test_a_foreign_folder_without_a_cluster_is_no_error(file: Path) -> None:
    """Another user has used Ray on this machine before."""
    if os.getuid():
        pytest.skip("only root can give a folder to another user")
    os.chown(file.parent, NOBODY, NOBODY)
    assert ray_cluster.find_cluster({}).starts


def test_a_file_of_a_private_group_is_accepted(file: Path, silent_head: SilentHead) -> None:
    """Many systems give each user a group, and include it in the permissions of new files."""
    user = pwd.getpwuid(os.getuid())
    if grp.getgrgid(user.pw_gid).gr_name != user.pw_name:
        pytest.skip("this user has no group of the same name")
    file.write_text(silent_head.address)
    os.chown(file, -1, user.pw_gid)
    file.chmod(0o664)
    assert ray_cluster.find_cluster({}).address == silent_head.address


def test_a_silent_head_is_an_error_in_thirty_seconds(tmp_path: Path, file: Path, silent_head: SilentHead) -> None:
    """A process of its own shows that the run ends, and what it prints and sends until then."""
    file.write_text(silent_head.address)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_TMPDIR": str(tmp_path), "HF_TOKEN": "hf_planted_secret", "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    start_time = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", JOIN], env=environment, text=True, capture_output=True, timeout=120, check=False
    )
    assert time.monotonic() - start_time > 25, run.stdout + run.stderr
    user = pwd.getpwuid(os.getuid()).pw_name
    expected = f"no Ray cluster answers at {silent_head.address} (the file {file} of user {user}) within 30 s"
    assert run.stdout.startswith(expected), run.stdout + run.stderr
    assert "rpc_client" not in run.stderr, "raw lines of Ray"
    assert "planted" not in repr(silent_head.received)


JOIN = """
from camshaft.controller import PoolSpec, start_pools
from camshaft.controller.group import Options
from camshaft.errors import ConfigError

try:
    start_pools([PoolSpec(device="cpu")], "ray", Options(ray_init={"runtime_env": {"env_vars": {"A": "planted"}}}))
except ConfigError as error:
    print(error)
"""
