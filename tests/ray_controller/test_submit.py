"""The scripts in examples/cluster, on a cluster of this machine or on two machines with networks.

Shell scripts of a few lines replace `srun`, `scontrol` and `ssh`; they run commands on the requested machine. The
manifest for Kubernetes is compared with the fields of KubeRay's types.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.namespaces import ROOT, Machine, two_connected_machines, unavailable_reason
from support.ppo_runs import ppo_args
from support.processes import MARK, marked, still_running

from camshaft.controller.network import accepts_connections

pytestmark = [pytest.mark.timeout(280), pytest.mark.alone]

CLUSTER = ROOT / "examples" / "cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sh"))
RUN: dict[str, Any] = {
    "trainer.controller": "ray",
    "trainer.total_training_steps": 2,
    "trainer.total_epochs": 1,
    "trainer.logger": "[console,jsonl]",
}


def environment(**more: str) -> dict[str, str]:
    """Return the environment without Ray's variables and with the commands of this Python first on PATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    return {**kept, **quiet, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


def finished(command: list[str], env: Mapping[str, str], cwd: Path, seconds: float = 200) -> str:
    """Return the output of the process; it must succeed within the time limit."""
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            out, _ = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, out[-5000:]
    return out


def steps_of(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["step"] for line in lines]


# -- a job on a running cluster ----------------------------------------------------------------------


@contextlib.contextmanager
def ray_head(folder: Path, num_cpus: int) -> Iterator[str]:
    """Start a cluster with Ray's command line, and return the address of its dashboard."""
    mark = uuid.uuid4().hex
    port, dashboard = free_port(), free_port()
    ports = (f"--port={port}", f"--dashboard-port={dashboard}", "--dashboard-agent-listen-port=0")
    ports += (f"--ray-client-server-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0")
    size = (f"--num-cpus={num_cpus}", f"--object-store-memory={2**28}", f"--temp-dir={folder}")
    try:
        finished(["ray", "start", "--head", *ports, *size], environment(**{MARK: mark}), folder, 60)
        deadline = time.monotonic() + 60
        while not accepts_connections("127.0.0.1", dashboard) and time.monotonic() < deadline:
            time.sleep(0.2)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert still_running(marked(mark)) == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return a folder with a short path, because the length of socket paths is limited."""
    folder = Path(f"/tmp/cs-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.cluster
def test_a_run_is_a_job_of_a_running_cluster(tmp_path: Path, short_folder: Path) -> None:
    """The job and the cluster have runtime environments, and arguments contain characters that a shell interprets."""
    args = ppo_args(tmp_path, {**RUN, "+ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG": "WARN"})
    with ray_head(short_folder, num_cpus=4) as dashboard:
        job = {"ID": "sums", "RUNTIME_ENV": '{"env_vars": {"HF_HUB_OFFLINE": "1"}}'}
        env = environment(RAY_API_SERVER_ADDRESS=dashboard, **job)
        out = finished([str(CLUSTER / "submit.sh"), *args], env, tmp_path)
        status = finished(["ray", "job", "status", "--address", dashboard, "sums"], environment(), tmp_path, 60)
    assert "step 2/2" in out
    assert "SUCCEEDED" in status.upper()
    assert steps_of(tmp_path / "run") == [1, 2]
    assert (tmp_path / "run" / "logs" / "global_pool_rank0.log").exists()


# -- two machines ------------------------------------------------------------------------------------

GO = 'exec nsenter --target="$(cat "$MACHINES/{name}")" --net --pid --mount --uts --wd="{cwd}"'
END = "setpriv --pdeathsig TERM"
"""Makes processes end with `nsenter`, as a step ends with `srun`."""
SRUN = f"""#!/bin/bash
while [[ $1 == --* ]]; do
    [[ $1 == --nodelist=* ]] && machine=${{1#*=}}
    shift
done
{GO.format(name="$machine", cwd="$PWD")} {END} "$@"
"""
SCONTROL = """#!/bin/bash
[[ $* == "show hostnames one,two" ]] && printf 'one\\ntwo\\n'
"""
SSH = f"""#!/bin/bash
shift 2  # -o BatchMode=yes
{GO.format(name="$1", cwd="/")} env -i PATH=/usr/bin:/bin:/usr/sbin RAY_AUTH_MODE=disabled PYTHONPATH="$PYTHONPATH" \\
    OMP_NUM_THREADS=1 bash -c "$2"
"""


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    with two_connected_machines() as two:
        yield two


@pytest.fixture
def cluster_commands(tmp_path: Path, machines: tuple[Machine, Machine]) -> dict[str, str]:
    """Return the environment in which `srun`, `scontrol` and `ssh` reach the machines."""
    folder = tmp_path / "cluster_commands"
    folder.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "ssh": SSH}.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    for name, machine in zip(("one", "two"), machines, strict=True):
        (folder / name).write_text(str(machine.pid), encoding="utf-8")
    env = environment(MACHINES=str(folder))
    return {**env, "PATH": f"{folder}:{env['PATH']}"}


SHARDED = {"actor_rollout_ref.actor.strategy": "fsdp", "critic.strategy": "fsdp"}


def script_args(folder: Path) -> list[str]:
    """Return the arguments of a run without those that the scripts add."""
    added = ("trainer.nnodes=", "trainer.controller=")
    return [word for word in ppo_args(folder, {**RUN, **SHARDED}) if not word.startswith(added)]


def logs_of_two_ranks(run: Path) -> bool:
    return all((run / "logs" / f"global_pool_rank{rank}.log").exists() for rank in range(2))


def remaining_daemons(machine: Machine) -> list[str]:
    """Return the daemons that do not exit within a few seconds."""
    deadline = time.monotonic() + 120
    while (running := machine.running("raylet")) and time.monotonic() < deadline:
        time.sleep(0.2)
    return running


@pytest.mark.cluster
def test_a_slurm_job_is_a_cluster_of_its_machines(
    tmp_path: Path, cluster_commands: dict[str, str], machines: tuple[Machine, Machine]
) -> None:
    args = script_args(tmp_path)
    slurm = {"SLURM_JOB_NODELIST": "one,two", "SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "2"}
    finished(["bash", str(CLUSTER / "slurm.sh"), *args], {**cluster_commands, **slurm}, tmp_path)
    assert steps_of(tmp_path / "run") == [1, 2]
    assert logs_of_two_ranks(tmp_path / "run")
    assert [remaining_daemons(machine) for machine in machines] == [[], []]


@pytest.mark.cluster
def test_machines_reached_by_ssh_form_a_cluster(
    tmp_path: Path, cluster_commands: dict[str, str], machines: tuple[Machine, Machine]
) -> None:
    args = script_args(tmp_path)
    finished([str(CLUSTER / "ssh.sh"), *args], {**cluster_commands, "HOSTS": "one two"}, tmp_path)
    assert steps_of(tmp_path / "run") == [1, 2]
    assert logs_of_two_ranks(tmp_path / "run")
    assert [remaining_daemons(machine) for machine in machines] == [[], []]


# -- scripts and manifest as text --------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_shell(script: Path) -> None:
    assert os.access(script, os.X_OK)
    for checker in (["bash", "-n"], ["shellcheck"]):
        if shutil.which(checker[0]):
            process = subprocess.run([*checker, str(script)], capture_output=True, text=True, timeout=30, check=False)
            assert process.returncode == 0, process.stdout + process.stderr


JOB = {
    *("entrypoint", "runtimeEnvYAML", "submissionMode", "submitterConfig", "shutdownAfterJobFinishes"),
    *("ttlSecondsAfterFinished", "rayClusterSpec", "backoffLimit", "activeDeadlineSeconds", "metadata", "jobId"),
    *("entrypointNumCpus", "entrypointNumGpus", "entrypointResources", "suspend", "submitterPodTemplate"),
}
"""Fields of a RayJob's spec in ray.io/v1, available since KubeRay 1.2."""
HEAD = {"rayStartParams", "template"}
GROUP = {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"}
"""Required fields."""


def test_the_manifest_has_the_fields_of_a_ray_job() -> None:
    manifest = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    spec = manifest["spec"]
    assert spec.keys() <= JOB
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "InteractiveMode")
    cluster = spec["rayClusterSpec"]
    assert cluster.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert cluster["headGroupSpec"].keys() == HEAD
    (group,) = cluster["workerGroupSpecs"]
    assert group.keys() == GROUP | {"replicas"}
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    for part in (cluster["headGroupSpec"], group):
        assert all(isinstance(value, str) for value in part["rayStartParams"].values())
        pod = part["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {"name", "image", "resources", "volumeMounts"} == container.keys()
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert all(isinstance(amount, str) for amount in container["resources"]["limits"].values())
    environment_of_job = yaml.safe_load(spec["runtimeEnvYAML"])
    assert all(isinstance(value, str) for value in environment_of_job["env_vars"].values())


def test_the_manifest_requests_the_machines_of_the_run() -> None:
    spec = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]
    command, run, *args = spec["entrypoint"].split()
    assert [command, run] == ["camshaft", "ppo"]
    requested = dict(word.split("=", 1) for word in args)
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert int(requested["trainer.nnodes"]) == group["replicas"]
    assert requested["trainer.n_gpus_per_node"] == container["resources"]["limits"]["nvidia.com/gpu"]
