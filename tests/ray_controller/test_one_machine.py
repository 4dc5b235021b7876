"""The Ray backend on one machine: the rules of the controller contract, and PPO with the numbers of local ranks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cluster import ray_here
from support.episodes import EPISODES, TURNS, game
from support.late_rank import late_rank
from support.ppo_runs import Step, run_ppo
from support.processes import command_line, marked, none_left_behind
from support.reward_models import NEWLINE, make_tiny_reward_model
from support.same_run import ACTOR, RANKS, SHUFFLED, compare

from camshaft import storage
from camshaft.contracts.controller.harness import ControllerHarness
from camshaft.contracts.controller.suite import RULES
from camshaft.contracts.rules import Rule
from camshaft.controller.ray import start
from camshaft.controller.ray_environment import SEVERAL_MACHINES
from camshaft.errors import DivergenceError

pytestmark = [pytest.mark.timeout(280), pytest.mark.alone]

RAY: dict[str, Any] = {"trainer.controller": "ray"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_here(num_cpus=12):
        yield


FAST = {"exceptions reach the driver", "killed ranks are errors"}
"""Rules that `make test` checks. On Ray each rank imports torch, and a PPO run shows what the other rules state."""


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=[pytest.mark.slow] * (rule.name not in FAST)) for rule in RULES],
    ids=lambda rule: rule.name.replace(" ", "_"),
)
def test_ray_keeps_rule(rule: Rule[ControllerHarness], tmp_path: Path) -> None:
    rule.check(ControllerHarness(start, tmp_path))


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Step]]:
    """Return the folder and the steps of a run in this process."""
    home = tmp_path_factory.mktemp("home")
    return home, run_ppo(home, SHUFFLED, steps=2)


def untimed(step: Step) -> dict[str, float]:
    measured = ("timing_s/", "perf/", "agent/tool_seconds")
    return {name: value for name, value in step.metrics.items() if not name.startswith(measured)}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_one_rank_on_ray_matches_an_in_process_run_bitwise(tmp_path: Path) -> None:
    local, remote = (run_ppo(tmp_path, {"algorithm.use_kl_in_reward": True, **more}, steps=2) for more in ({}, RAY))
    for actual, expected in zip(remote, local, strict=True):
        assert untimed(actual) == untimed(expected)
        assert all(torch.equal(actual.actor[name], weight) for name, weight in expected.actor.items())
        assert all(torch.equal(actual.critic[name], weight) for name, weight in expected.critic.items())


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks_on_ray_give_the_same_numbers(ranks: int, in_process: tuple[Path, list[Step]]) -> None:
    home, steps = in_process
    compare(run_ppo(home, {**SHUFFLED, **RANKS, **RAY, "trainer.n_gpus_per_node": ranks}, steps=2), steps, rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_episodes_on_ray_match_those_of_a_local_run_bitwise(tmp_path: Path) -> None:
    settings = {**EPISODES, f"{TURNS}.environment": game(tmp_path)}
    local, remote = (run_ppo(tmp_path, settings | more, steps=2) for more in ({}, RAY))
    for actual, expected in zip(remote, local, strict=True):
        assert untimed(actual) == untimed(expected)
        assert actual.metrics["agent/turns"] == 3
        assert all(torch.equal(actual.actor[name], weight) for name, weight in expected.actor.items())


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_two_ray_ranks_match_two_local_ranks_bitwise(tmp_path: Path) -> None:
    local, remote = (run_ppo(tmp_path, {**SHUFFLED, **RANKS, **more}, steps=2) for more in ({}, RAY))
    for actual, expected in zip(remote, local, strict=True):
        assert untimed(actual) == untimed(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_scoring_begins_while_another_rank_generates(tmp_path: Path) -> None:
    with late_rank(tmp_path, 0) as overrides:
        overrides |= {**RANKS, "algorithm.adv_estimator": "reinforce_plus_plus", "actor_rollout_ref.rollout.n": 2}
        (remote,) = run_ppo(tmp_path, {**overrides, **RAY}, steps=1)
        (local,) = run_ppo(tmp_path, overrides, steps=1)
    assert untimed(remote) == untimed(local)
    assert remote.metrics["reward/errors"] > 0, "the test needs a row that fails"


POOLS: dict[str, Any] = {
    **RANKS,
    "actor_rollout_ref.resource_pool": "a",
    "critic.resource_pool": "b",
    "reward_model.resource_pool": "c",
    "trainer.n_gpus_per_node": 1,
    "+trainer.resource_pools.a.n_gpus_per_node": 2,
    "+trainer.resource_pools.b.n_gpus_per_node": 1,
    "+trainer.resource_pools.c.n_gpus_per_node": 1,
}
"""The actor has two ranks, the critic one, and the reward model another one, each in a separate pool."""


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_separate_pools_on_ray_match_local_ones_bitwise(tmp_path: Path) -> None:
    overrides = {
        **SHUFFLED,
        "reward_model.enable": True,
        "reward_model.model.path": make_tiny_reward_model(tmp_path / "rm", template=NEWLINE, turned=True),
        "reward_model.strategy": f"${{{ACTOR}.strategy}}",
        "reward_model.micro_batch_size_per_gpu": 3,
        "reward_model.max_length": 60,
    }
    in_process, local, remote = (run_ppo(tmp_path, overrides | more, steps=2) for more in ({}, POOLS, POOLS | RAY))
    compare(local, in_process, rel=1e-6)
    for actual, expected in zip(remote, local, strict=True):
        assert untimed(actual) == untimed(expected)
        assert actual.metrics["reward/model/mean"] != 0


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_diverged_run_on_ray_keeps_its_last_checkpoint(role: str, tmp_path: Path) -> None:
    key = {"actor": f"{ACTOR}.optim.lr", "critic": "critic.optim.lr"}[role]
    saving = {"trainer.save_freq": 1, "trainer.resume_mode": "auto"}
    keep_one = {"trainer.max_actor_ckpt_to_keep": 1, "trainer.max_critic_ckpt_to_keep": 1}
    settings = {**RANKS, **RAY, **saving, **keep_one}
    run_ppo(tmp_path, settings, steps=2)
    with pytest.raises(DivergenceError, match=rf"weights of {role} are not finite or too large after step 3.*lower"):
        run_ppo(tmp_path, settings | {key: 1e30}, steps=4)
    assert [step for step, _ in storage.step_folders(tmp_path / "run")] == [2]
    assert len(run_ppo(tmp_path, settings, steps=3)) == 1, "the run resumes from step 2"


OWN_CLUSTER = """
from camshaft.controller.group import Options
from camshaft.controller.ray_environment import start
from camshaft.controller.resources import PoolSpec

(pool,) = start([PoolSpec(device="cpu")], Options(ray_init={"address": "local", "include_dashboard": False}))
input("started\\n")
pool.shutdown()
"""


@pytest.mark.slow
def test_daemons_of_a_cluster_for_one_run_collect_no_metrics() -> None:
    with none_left_behind(30.0) as mark:
        script = [sys.executable, "-c", OWN_CLUSTER]
        with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "started\n"
            (raylet,) = (pid for pid in marked(mark) if command_line(pid).split()[0].endswith("/raylet"))
            environment = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
            driver.communicate("\n", timeout=60)
            assert driver.returncode == 0
    assert {b"RAY_enable_metrics_collection=0", b"RAY_event_stats=0"} <= set(environment)


AFTER_IMPORT = """
import ray
from camshaft.controller import PoolSpec, start_pools
from camshaft.controller.group import Options

start_pools([PoolSpec(device="cpu")], "ray", Options(ray_init={"address": "local", "num_cpus": 1}))
print(*(node["NodeManagerAddress"] for node in ray.nodes()))
"""


@pytest.mark.cluster
def test_a_run_starts_a_local_cluster_after_ray_has_been_imported(tmp_path: Path) -> None:
    names = {"RAY_AUTH_MODE", "RAY_ADDRESS", SEVERAL_MACHINES}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}  # Ray stores a token at home
    run = subprocess.run(
        [sys.executable, "-c", AFTER_IMPORT], env=environment, text=True, capture_output=True, timeout=120, check=False
    )
    assert (run.returncode, run.stdout.split()[-1:]) == (0, ["127.0.0.1"]), run.stderr
