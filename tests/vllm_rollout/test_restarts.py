"""A run goes on if vLLM is killed in a named state: greedy tokens are those of the trained model, log-probs agree.

Run by `make test-server`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import interrupting
from support.ppo_runs import ppo_config
from support.processes import children, command_line, forked, still_running
from support.vllm_runs import FOR_VLLM, StepResponses, run_with_vllm, wait_until_it_generates, with_wide_heads

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.rollout.server import launch
from camshaft.trainer import ppo_trainer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

AT, STEPS = 2, 3
STATES = ("receiving", "generating", "learning")
ROLLOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("rollout", {"actor_rollout_ref.rollout.name": "vllm"}),
    "server": (
        "server",
        {
            "actor_rollout_ref.rollout.name": "server",
            "actor_rollout_ref.rollout.engine_kwargs": "{vllm_server_timeout: 600}",
        },
    ),
}
"""Process to kill, and settings."""
ADAPTER = {
    "actor_rollout_ref.model.lora_rank": 4,
    "actor_rollout_ref.rollout.lora_weights": "adapter",
    "actor_rollout_ref.actor.optim.lr": 1e-1,
}
RESTARTED = "starts again (restart 1 of 3 in a row)"


def generators() -> dict[str, int]:
    """Return the processes of this run that have vLLM: a rank of the rollout, and its server."""
    ranks = [pid for pid in forked() if Path(f"/proc/{pid}/fd/1").readlink().name.startswith("rollout_rank")]
    servers = [pid for rank in ranks for pid in children(rank) if "openai.api_server" in command_line(pid)]
    return dict(zip(("rollout", "server"), (*ranks, *servers), strict=False))


def killing(victim: str) -> Callable[[Path], None]:
    return lambda file: os.kill(generators()[victim], signal.SIGKILL)


@contextmanager
def killed_in(
    state: str, kill: Callable[[Path], None], run: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mapping[str, Any]]:
    """Call `kill` with the file that holds the run when step `AT` is in a state. Yield settings of the run."""
    killed = list[bool]()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    run.mkdir()
    (file := run / f"hold_{state}").write_text(str(AT))

    def kill_when_held() -> None:
        while not (run / "held").exists():
            if not file.exists():
                return
            time.sleep(0.05)
        try:
            kill(file)
            killed.append(True)
        finally:
            file.unlink(missing_ok=True)

    thread = threading.Thread(target=kill_when_held)
    thread.start()
    try:
        yield {
            "actor_rollout_ref.hybrid_engine": False,
            "actor_rollout_ref.worker_cls": interrupting.HOLDING,
            "trainer.default_local_dir": run,
        }
        assert killed
    finally:
        file.unlink(missing_ok=True)
        thread.join()
    assert not still_running(generators().values())


@pytest.mark.parametrize("rollout", ROLLOUTS)
@pytest.mark.parametrize("state", STATES)
def test_a_killed_generator_has_the_weights_of_its_step_again(
    state: str, rollout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    victim, settings = ROLLOUTS[rollout]
    with killed_in(state, killing(victim), tmp_path / "run", monkeypatch) as held:
        responses = run_with_vllm(tmp_path, {**settings, **held}, STEPS)
    assert caplog.text.count(RESTARTED) == 1
    assert_weights_of_each_step(responses)


def test_a_killed_generator_has_the_base_and_the_adapter_of_its_step_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    victim, settings = ROLLOUTS["vllm"]
    with killed_in("generating", killing(victim), tmp_path / "run", monkeypatch) as held:
        responses = run_with_vllm(tmp_path, {**settings, **held, **ADAPTER}, STEPS)
    assert caplog.text.count(RESTARTED) == 1
    assert_weights_of_each_step(responses, tolerance=1e-3)  # base + B A rounds differently from merged weights


def assert_weights_of_each_step(responses: list[StepResponses], tolerance: float = 1e-4) -> None:
    assert len(responses) == STEPS
    for step, response in enumerate(responses):
        assert response.by_vllm == response.by_transformers
        assert response.metrics["rollout/log_prob_diff_max"] < tolerance
        assert response.metrics.get("rollout/weights_version", step) == step
    assert responses[0].by_vllm != responses[-1].by_vllm


class UsersServer:
    """A server of a user, who starts it again on the same port three seconds after it was killed."""

    def __init__(self, model: Path):
        self._config = RolloutEngineConfig(model_path=str(model), dtype="float32")
        self.process = launch.ServerProcess(self._config, {})
        self.process.wait(600)

    def kill(self, file: Path) -> None:
        """Kill the server and release the run, which generates before in that state."""
        if file.name == "hold_generating":
            file.unlink()
            wait_until_it_generates(self.process.url, self.process.key)
        os.kill(self.process._server.pid, signal.SIGKILL)
        file.unlink(missing_ok=True)
        while not self.process.exit_report():
            time.sleep(0.05)
        time.sleep(3.0)
        self.process = launch.ServerProcess(self._config, {})


@pytest.fixture
def users_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UsersServer]:
    port = launch._free_port()
    monkeypatch.setattr(launch, "_free_port", lambda: port)
    monkeypatch.setenv("VLLM_API_KEY", "a secret of the tests")
    with_wide_heads(tmp_path)
    server = UsersServer(tmp_path / "actor")
    yield server
    server.process.end()


@pytest.mark.parametrize("state", STATES)
def test_a_users_server_that_comes_back_has_the_weights_of_its_step(
    state: str,
    users_server: UsersServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kwargs = f"{{vllm_server_base_url: '{users_server.process.url}', vllm_server_timeout: 600}}"
    settings = {"actor_rollout_ref.rollout.name": "server", "actor_rollout_ref.rollout.engine_kwargs": kwargs}
    with killed_in(state, users_server.kill, tmp_path / "run", monkeypatch) as held:
        responses = run_with_vllm(tmp_path, {**settings, **held, "data.max_response_length": 64}, STEPS)
    assert caplog.text.count(RESTARTED) == 1
    assert_weights_of_each_step(responses)


class Recorder:
    """A tracker that keeps the metrics."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps.append(metrics)


@pytest.mark.parametrize("state", STATES)
def test_probes_agree_with_vllm_also_after_it_is_killed(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_wide_heads(tmp_path)
    stale = {"async_training.max_staleness": 1, "algorithm.rollout_correction.rollout_is": "token"}
    longest = {"data.max_prompt_length": 9, "data.truncation": "left", "actor_rollout_ref.rollout.ignore_eos": True}
    lengths = {"trainer.total_training_steps": 5, "trainer.total_epochs": 5}
    with killed_in(state, killing("rollout"), tmp_path / "run", monkeypatch) as held:
        config = ppo_config(tmp_path, {**FOR_VLLM, **stale, **longest, **lengths, **held})
        recorder = Recorder()
        with ppo_trainer(config).open(config) as trainer:
            trainer.prepare()
            trainer.fit(recorder)  # pyright: ignore[reportArgumentType]
    assert caplog.text.count(RESTARTED) == 1
    assert recorder.steps[0]["rollout/log_prob_diff_max"] < 1e-4
    probed = [(step["async/probe_version"], step["async/probe_log_prob_diff_mean"]) for step in recorder.steps[2:]]
    assert [version for version, _ in probed] == [0.0, 1.0, 2.0]
    assert max(difference for _, difference in probed) < 1e-4
