"""Ray shows and stores no secrets of a run, and the ranks receive them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.planted_secrets import MARKS, leaks, prepare, run

pytestmark = [pytest.mark.timeout(280), pytest.mark.alone, pytest.mark.cluster]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Return a folder for the sessions of Ray, whose sockets need short names."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


VARIABLES = "+ray_kwargs.ray_init.runtime_env.env_vars"


def test_a_run_on_ray_writes_no_secrets(tmp_path: Path, ray_folder: Path) -> None:
    arguments = prepare(tmp_path, {"trainer.controller": "ray", "trainer.logger": "[console,jsonl]"})
    arguments += [f"{VARIABLES}.JUDGE_API_KEY=runtime-secret-key", f"{VARIABLES}.CAMSHAFT_PUBLIC=1"]
    out = run(["ppo", *arguments], RAY_TMPDIR=str(ray_folder), HOME=str(tmp_path))
    assert [mark for mark in MARKS if mark in out] == []
    assert leaks(tmp_path / "run") == []
    assert list(ray_folder.glob("ray/session_*/logs/gcs_server*")), "Ray wrote no logs"
    assert leaks(ray_folder) == []


JOB = """
import os
from pathlib import Path

import ray
from ray._raylet import GcsClient

from camshaft.controller import Dispatch, PoolSpec, Worker, register, spawn, start_pools
from camshaft.controller.group import Options


class Reader(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self):
        return os.environ["JUDGE_API_KEY"], os.environ["PUBLIC"]


variables = {"JUDGE_API_KEY": "runtime-secret-key", "PUBLIC": "public-value", "NUMBER": 1}
ray_init = {"address": "local", "runtime_env": {"env_vars": variables}}
(pool,) = start_pools([PoolSpec(device="cpu")], "ray", Options(ray_init=ray_init))
print("JOB", repr(str(GcsClient(address=ray.get_runtime_context().gcs_address).get_all_job_info())))
print("PROCESS", Path("/proc/self/cmdline").read_bytes())
print("ROLE", spawn(Reader, pool=pool).read())
"""


def test_the_job_that_ray_shows_contains_no_secrets(tmp_path: Path, ray_folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_TMPDIR": str(ray_folder), "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, str(tmp_path / "job.py"), "reward_kwargs.api_key=argument-secret", "steps=7"]
    job = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120, check=False)
    assert job.returncode == 0, job.stderr
    shown, process, role = (line for line in job.stdout.splitlines() if line.startswith(("JOB", "PROCESS", "ROLE")))
    assert "runtime-secret-key" in role, "the ranks need the secret"
    assert "public-value" in role
    assert "public-value" in shown
    assert "reward_kwargs.api_key=*** steps=7" in shown.replace("'", "").replace("\\", "")
    assert [mark for mark in MARKS if mark in shown + process] == []
