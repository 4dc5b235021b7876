"""A server that a user has started is killed, and started again or not: the run goes on, or names what is missing."""

import math
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support import delays
from support.ppo_runs import Step, ppo_args, run_ppo
from support.users_server import STATES, Death, UsersServer, users_server

from camshaft.digest import digest
from camshaft.errors import WorkerError

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

ROLLOUT = "actor_rollout_ref.rollout"
KWARGS = f"+{ROLLOUT}.engine_kwargs"
STEPS, AT = 4, 1
AWAY_SECONDS = 3.0
"""Time between the death of a server and its next start."""
RETRY_SECONDS = (0.5, 8.0)
"""Requests are retried for less or for more time than the server is away."""
MEASURED = ("timing_s/", "timing/", "perf/", "async/", "rollout/http_retries")
RUN: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.hybrid_engine": False,
    f"{ROLLOUT}.n": 2,
    f"{ROLLOUT}.name": "server",
    "custom_reward_function.path": delays.__file__,
}
STALENESS: dict[int, dict[str, Any]] = {
    0: {},
    1: {"async_training.max_staleness": 1, "algorithm.rollout_correction.rollout_is": "token"},
}


def train(folder: Path, server: UsersServer, max_staleness: int, **options: float) -> list[Step]:
    kwargs = {f"{KWARGS}.{name}": value for name, value in {"vllm_server_base_url": server.url, **options}.items()}
    return run_ppo(folder, {**RUN, **STALENESS[max_staleness], **kwargs}, STEPS)


@cache
def undisturbed(home: Path, max_staleness: int) -> list[Step]:
    with users_server(home / f"undisturbed{max_staleness}", home / "actor", death=None) as server:
        return train(home, server, max_staleness)


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    ppo_args(home)
    return home


CASES = list(product(STATES, STALENESS, RETRY_SECONDS))
FAST = ("generating", 1, RETRY_SECONDS[0])


@pytest.mark.parametrize(
    ("state", "max_staleness", "retry_timeout"),
    [pytest.param(*case, marks=() if case == FAST else pytest.mark.slow) for case in CASES],
)
def test_a_server_that_comes_back_gets_the_weights_again(
    state: str, max_staleness: int, retry_timeout: float, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(delays.SECONDS, "0")
    expected = undisturbed(home, max_staleness)
    if state == "idle":  # a batch is scored for longer than the next one is generated
        monkeypatch.setenv(delays.SECONDS, "2")
    with users_server(tmp_path / "server", home / "actor", Death(state, AT), AWAY_SECONDS) as server:
        steps = train(home, server, max_staleness, retry_timeout=retry_timeout)
    assert server.num_starts() == 2
    assert_equal(steps, expected)
    if not max_staleness:  # stale tokens have other log-probs
        assert all(step.metrics["rollout/log_prob_diff_max"] < 1e-4 for step in steps)
    versions = [version for version, _ in server.synced()]
    assert versions == sorted(versions)
    assert versions.count(AT) == (2 if state == "generating" else 1)
    for version, digests in server.synced():
        if version:
            assert digests == {name: digest(weight) for name, weight in steps[version - 1].actor.items()}


def assert_equal(steps: list[Step], expected: list[Step]) -> None:
    for step, reference in zip(steps, expected, strict=True):
        assert torch.equal(step.batch["responses"].values, reference.batch["responses"].values)
        assert all(torch.equal(step.actor[name], weight) for name, weight in reference.actor.items())
        for name, value in reference.metrics.items():
            is_equal = step.metrics[name] == value or (math.isnan(value) and math.isnan(step.metrics[name]))
            assert is_equal or name.startswith(MEASURED), name


@pytest.mark.parametrize(
    "state", [pytest.param(state, marks=() if state == "generating" else pytest.mark.slow) for state in STATES]
)
def test_a_server_that_stays_away_is_named_with_the_wait(
    state: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(delays.SECONDS, "2" if state == "idle" else "0")
    with users_server(tmp_path / "server", home / "actor", Death(state, AT)) as server:
        message = (
            rf"no server is ready at vllm_server_base_url={server.url} after 2 s \(vllm_server_timeout\): .*refused.*"
            "Start the server and then the run again, or increase vllm_server_timeout"
        )
        with pytest.raises(WorkerError, match=message):
            train(home, server, max_staleness=1, retry_timeout=0.5, vllm_server_timeout=2.0)
    assert server.num_starts() == 1
