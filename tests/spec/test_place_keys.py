"""Keys of placement, engines and trackers, observed at the objects that they configure."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.ppo_runs import ppo_config

from camshaft.config import PPOConfig
from camshaft.controller.placement import pool_specs, run_pools
from camshaft.roles import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from camshaft.tracking import RunInfo, Tracker
from camshaft.trainer.session import Session
from spec.fields import ACTOR, ROLLOUT
from spec.test_fields import run_with

POOL = {"trainer.resource_pools": {"apart": {"n_gpus_per_node": 1}}}


def pools(config: PPOConfig) -> dict[str, tuple[int, int]]:
    return {role: (spec.nnodes, spec.ranks_per_node) for spec in pool_specs(config) for role in spec.roles}


def cpus(config: PPOConfig) -> set[float]:
    return {spec.cpus_per_rank for spec in pool_specs(config)}


SHARED = {"actor_rollout_ref": (1, 4), "critic": (1, 4), "reward_model": (1, 4)}

PLACED: dict[str, tuple[Any, Mapping[str, Any], Callable[[PPOConfig], Any], Any, Any]] = {
    # key: value, other keys, observation, observed without the key, observed with it
    "trainer.nnodes": (2, {}, pools, SHARED, dict.fromkeys(SHARED, (2, 4))),
    "trainer.n_gpus_per_node": (2, {}, pools, SHARED, dict.fromkeys(SHARED, (1, 2))),
    "trainer.cpus_per_rank": (0.5, {}, cpus, {1.0}, {0.5}),
    "actor_rollout_ref.resource_pool": (
        "apart", POOL | {"critic.resource_pool": "apart", f"{ROLLOUT}.tensor_model_parallel_size": 1}, pools,
        SHARED | {"critic": (1, 1)}, SHARED | {"critic": (1, 1), "actor_rollout_ref": (1, 1)},
    ),
    "actor_rollout_ref.hybrid_engine": (False, {}, pools, SHARED, SHARED | {"rollout": (1, 1)}),
    "critic.resource_pool": (
        "apart", POOL | {"reward_model.resource_pool": "apart"}, pools,
        SHARED | {"reward_model": (1, 1)}, SHARED | {"critic": (1, 1), "reward_model": (1, 1)},
    ),
    "reward_model.resource_pool": (
        "apart", POOL | {"critic.resource_pool": "apart"}, pools,
        SHARED | {"critic": (1, 1)}, SHARED | {"critic": (1, 1), "reward_model": (1, 1)},
    ),
    "trainer.resource_pools": (
        {"apart": {"n_gpus_per_node": 2}}, {"critic.resource_pool": "apart"} | POOL, pools,
        SHARED | {"critic": (1, 1)}, SHARED | {"critic": (1, 2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", PLACED)
def test_key_changes_the_requested_processes(key: str, tmp_path: Path) -> None:
    value, others, observe, before, after = PLACED[key]
    assert observe(run_with(tmp_path, others)) == before
    assert observe(run_with(tmp_path, {**others, key: value})) == after


def test_time_limits_reach_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[Any] = []
    monkeypatch.setattr(
        "camshaft.controller.placement.pools", lambda _, __, given: nullcontext(options.append(given) or [])
    )
    limits = {
        "trainer.worker_timeout": 60,
        "trainer.worker_timeouts.save": 90,
        "trainer.worker_timeouts.update": 70,
        "trainer.worker_timeouts.generate": 80,
    }
    for overrides in ({}, limits):
        config = ppo_config(tmp_path, overrides)
        with run_pools(config.trainer, pool_specs(config), {}, None):
            pass
    methods = ("update_actor", "save_checkpoint", "generate_sequences", "compute_values")
    assert [options[0].limit(method).seconds for method in methods] == [3600] * 4
    assert [options[1].limit(method) for method in methods] == [
        (70, "trainer.worker_timeouts.update=70"),
        (90, "trainer.worker_timeouts.save=90"),
        (80, "trainer.worker_timeouts.generate=80"),
        (60, "trainer.worker_timeout=60"),
    ]
    assert options[1].longest_timeout() == 90


@pytest.mark.parametrize(
    "key", ["trainer.controller", "ray_kwargs.ray_init", "trainer.device", "trainer.default_local_dir"]
)
def test_key_reaches_the_controller(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the controller show the effect of these settings."""
    settings: dict[str, Any] = {}

    def start(specs: Any, options: Any) -> list[Any]:
        settings.update(device=specs[0].device, ray=dict(options.ray_init), logs=options.log_folder)
        return []

    monkeypatch.setattr("camshaft.trainer.session.check_device", lambda *_: None)
    for backend in ("local", "ray"):
        monkeypatch.setattr(
            f"camshaft.controller.{backend}.start",
            lambda specs, options, name=backend: (settings.update(backend=name), start(specs, options))[1],
        )

    def observed(**changed: Any) -> dict[str, Any]:
        config = run_with(tmp_path, {"trainer.default_local_dir": f"{tmp_path}/run", **changed})
        logs = Path(config.trainer.default_local_dir) / "logs"
        with run_pools(config.trainer, pool_specs(config), config.ray_kwargs.ray_init, logs):
            return dict(settings)

    usual = {"backend": "local", "device": "cpu", "ray": {}, "logs": f"{tmp_path}/run/logs"}
    assert observed() == usual
    value, changed = {
        "trainer.controller": ("ray", {"backend": "ray"}),
        "ray_kwargs.ray_init": ({"num_cpus": 3}, {"ray": {"num_cpus": 3}}),
        "trainer.device": ("cuda", {"device": "cuda"}),
        "trainer.default_local_dir": (f"{tmp_path}/other", {"logs": f"{tmp_path}/other/logs"}),
    }[key]
    assert observed(**{key: value}) == usual | changed


BUILT: dict[str, Callable[[PPOConfig], Any]] = {
    f"{ACTOR}.strategy": lambda config: ActorRolloutRefWorker(config, config.topology(), 1).actor.engine,
    "critic.strategy": lambda config: CriticWorker(config, config.topology(), 1).engine,
    "reward_model.strategy": lambda config: RewardModelWorker(config, config.topology()).engine,
}


@pytest.mark.parametrize("key", BUILT)
def test_key_selects_the_engine(key: str, tmp_path: Path) -> None:
    ppo_config(tmp_path)
    folder = {f"{role}.path": tmp_path / "actor" for role in ("reward_model.model", "critic.model")}
    others = dict.fromkeys(BUILT, "fsdp")
    overrides = {**folder, "reward_model.enable": True, "reward_model.model.input_tokenizer": "null", **others}
    names = ("fsdp", "fsdp2", "fsdp1", "reference")
    engines = [type(BUILT[key](ppo_config(tmp_path, {**overrides, key: name}))).__name__ for name in names]
    assert engines == ["FSDPEngine", "FSDPEngine", "FSDP1Engine", "SingleDeviceEngine"]


WITHOUT_EFFECT = {
    "actor_rollout_ref.model.use_remove_padding": False,
    "critic.model.use_remove_padding": False,
}


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_key_without_effect_is_a_warning(key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_with(tmp_path, {})
    assert not any(key in message for message in caplog.messages)
    run_with(tmp_path, {key: WITHOUT_EFFECT[key]})
    (message,) = (message for message in caplog.messages if key in message)
    assert "has no effect" in message


class RecordingTracker(Tracker):
    """A tracker that records the `RunInfo` of each run."""

    runs: list[RunInfo] = []  # noqa: RUF012  (the trainer constructs the tracker)

    def __init__(self, run: RunInfo):
        self.runs.append(run)

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


RUN_FIELDS: dict[str, Callable[[RunInfo], str]] = {
    "trainer.project_name": lambda run: run.project,
    "trainer.experiment_name": lambda run: run.experiment,
}


@pytest.mark.parametrize("key", RUN_FIELDS)
def test_key_reaches_the_trackers(key: str, tmp_path: Path) -> None:
    RecordingTracker.runs.clear()
    for value in ({}, {key: "mine"}):
        config = run_with(tmp_path, {"trainer.logger": [f"{__name__}:RecordingTracker"], **value})
        Session(config.trainer).tracking(config, 1, None).finish()
    usual, changed = (RUN_FIELDS[key](run) for run in RecordingTracker.runs)
    assert usual != changed == "mine"
    assert (
        run_with(tmp_path, {key: "mine"}).trainer.default_local_dir != run_with(tmp_path, {}).trainer.default_local_dir
    )
