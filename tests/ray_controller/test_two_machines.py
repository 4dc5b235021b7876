"""The same PPO run on a cluster of two machines, simulated by `cluster.py` and `namespaces.py`."""

import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.across import chosen, failing, places
from support.cluster import two_machines
from support.namespaces import Machine, two_namespaces, unavailable_reason
from support.ppo_runs import Step, ppo_args, ppo_config, run_ppo
from support.same_run import RANKS, SHUFFLED, compare

from camshaft.planning.doctor.findings import Finding
from camshaft.planning.doctor.run import check_machines

pytestmark = [pytest.mark.timeout(280), pytest.mark.alone]

LAYOUT = {**SHUFFLED, **RANKS, "trainer.nnodes": 2, "trainer.n_gpus_per_node": 1}


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Step]]:
    """Return the folder and the steps of a run in this process."""
    home = tmp_path_factory.mktemp("home")
    return home, run_ppo(home, SHUFFLED, steps=2)


@pytest.mark.slow
def test_two_machines_give_the_same_numbers(in_process: tuple[Path, list[Step]]) -> None:
    home, steps = in_process
    with two_machines():
        compare(run_ppo(home, LAYOUT, steps=2), steps, rel=1e-6)


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines with separate networks."""
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    with two_namespaces() as two:
        yield two


def ranks_on(machine: Machine, within: float = 5.0) -> list[str]:
    """Return the worker processes that do not exit within this number of seconds."""
    deadline = time.monotonic() + within
    while (remaining := machine.running("ActorHost")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return remaining


@pytest.mark.slow
def test_machines_with_separate_networks_give_the_same_numbers(
    machines: tuple[Machine, Machine], in_process: tuple[Path, list[Step]]
) -> None:
    home, steps = in_process
    compare(machines[0].call(run_ppo, home, LAYOUT, 2), steps, rel=1e-6)


@pytest.mark.slow
def test_each_rank_has_its_node_and_network_interface(machines: tuple[Machine, Machine]) -> None:
    ranks = machines[0].call(places)
    assert sorted(host for host, *_ in ranks) == ["one", "two"]
    assert sorted(place.address for _, place, _ in ranks) == sorted(machine.address for machine in machines)
    assert {interface for *_, interface in ranks} == {"eth0"}
    assert [(place.rank, place.local_rank, place.local_world) for _, place, _ in ranks] == [(0, 0, 1), (1, 0, 1)]


@pytest.mark.slow
def test_doctor_finds_a_damaged_model_on_another_machine(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    head, worker = machines
    ppo_args(tmp_path)
    worker.run("mount", "--bind", str(tmp_path / "data"), str(tmp_path / "actor"))  # hides the model there
    try:
        findings = head.call(machine_findings, tmp_path, LAYOUT)
    finally:
        worker.run("umount", str(tmp_path / "actor"))
    problems = [finding.message for finding in findings if finding.status == "FAIL"]
    assert len(problems) == 1
    assert problems[0].startswith(f"{worker.address}: models: actor_rollout_ref.model.path=")
    assert "no config.json" in problems[0]
    of_head = [finding for finding in findings if finding.message.startswith(f"{head.address}: ")]
    assert [finding.status for finding in of_head] in (["OK"], ["WARN"]), of_head  # its host name may not resolve


def machine_findings(folder: Path, overrides: Mapping[str, Any]) -> list[Finding]:
    """Return what `camshaft doctor` finds on the machines of the cluster."""
    return list(check_machines(ppo_config(folder, overrides)))


@pytest.mark.cluster
def test_runtime_environment_variables_override_the_drivers(machines: tuple[Machine, Machine]) -> None:
    assert machines[0].call(chosen) == ["of the runtime environment"] * 2


@pytest.mark.cluster
def test_stack_of_a_hanging_rank_is_read_on_its_machine(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    message, seconds = machines[0].call(failing, "stall", tmp_path / "sign", 4.0)
    assert re.match(r"critic\.stall: no answer from rank\(s\) 1 of 2 \(process \d+\) for 4\.", message)
    assert "in stall" in message
    assert 4 <= seconds < 12
    assert [ranks_on(machine) for machine in machines] == [[], []]


@pytest.mark.cluster
def test_a_rank_killed_on_another_machine_is_a_prompt_error(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    message, seconds = machines[0].call(failing, "kill", tmp_path / "sign")
    assert message.startswith("rank 1 of 2 of critic (process ")
    assert "SIGKILL" in message
    assert seconds < 5
    assert [ranks_on(machine) for machine in machines] == [[], []]


@pytest.mark.cluster
def test_a_disconnected_machine_is_an_error_within_seconds(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """This test is the last one of the module because it breaks the cluster."""
    head, worker = machines
    sign = tmp_path / "sign"
    with ThreadPoolExecutor() as threads:
        failure = threads.submit(head.call, failing, "stall", sign)
        deadline = time.monotonic() + 60
        while not sign.exists() and not failure.done() and time.monotonic() < deadline:
            time.sleep(0.05)
        worker.unplug()
        message, seconds = failure.result(timeout=90)
    assert message.startswith(f"critic.stall: the Ray daemon of machine {worker.address}")
    assert "dead or disconnected" in message
    assert seconds < 15
    assert ranks_on(head) == []
