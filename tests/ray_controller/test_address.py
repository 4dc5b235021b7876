"""The cluster that a run joins, and the error without a cluster. These tests start no cluster."""

import os
import socket
import time
from pathlib import Path

import pytest
from ray._private import ray_constants

from camshaft.controller import PoolSpec, ray_cluster, start_pools
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
    monkeypatch.setattr(backend, "HEAD_SECONDS", 1.0)
    monkeypatch.setenv("RAY_ADDRESS", "" if where == "argument" else unused)
    options = Options(ray_init={"address": unused} if where == "argument" else {})
    start_time = time.monotonic()
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at {unused} .*ray start --head"):
        start_pools(HERE, "ray", options)
    assert time.monotonic() - start_time < 5


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
    for name in ("RAY_AUTH_MODE", ray_cluster.SEVERAL_MACHINES):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="stop here"):
        start_pools(HERE, "ray", Options(ray_init={"address": "local", "include_dashboard": dashboard}))
    assert [ray_cluster.NO_METRICS.items() <= environment.items() for environment in environments] == [not dashboard]
    assert not ray_cluster.NO_METRICS.keys() & os.environ.keys(), "the next cluster may have a dashboard"
    assert "RAY_AUTH_MODE" not in os.environ, "Ray has been imported without it"
    assert not ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://head:10001"])
def test_an_api_address_is_rejected_with_a_fix(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=r"<host>:<port>.*ray job submit"):
        start_pools(HERE, "ray")


def test_a_local_cluster_is_found_by_rays_address_file(
    tmp_path: Path, unused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_cluster._local_cluster() is None
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text(unused)
    assert ray_cluster._local_cluster() is None  # the process has exited
    with socket.create_server(("127.0.0.1", 0)) as head:
        file.write_text(f"127.0.0.1:{head.getsockname()[1]}")
        assert ray_cluster._local_cluster() == file.read_text()
