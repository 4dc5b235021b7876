"""Supervised fine-tuning and reward-model training with Megatron and torchtitan equal the reference engine.

Ranks are started by the local controller or by Ray.

Run by `make test-megatron` and `make test-titan`.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.cluster import ray_here
from support.command_line import rm_args, sft_args
from support.ppo_runs import saved_weights
from support.same_run import close

from camshaft.config import load_rm, load_sft
from camshaft.controller import local
from camshaft.tracking import deterministic
from camshaft.trainer.supervised import RMTrainer, SFTTrainer, SupervisedTrainer

pytestmark = pytest.mark.timeout(600)

local.PRELOAD.append("camshaft.engine.torchtitan.weights")  # skipped in environments without torchtitan

STEPS = 10
RUN: dict[str, Any] = {
    "data.train_batch_size": 6,
    "data.micro_batch_size_per_gpu": 2,
    "trainer.total_epochs": 3,
    "trainer.total_training_steps": STEPS,
    "trainer.test_freq": 5,
    "trainer.save_freq": STEPS,
    # In float32, Adam's division by small gradients would amplify rounding.
    "+optim.override_optimizer_config.eps": 1e-2,
}
MEGATRON = {"strategy": "megatron", "trainer.n_gpus_per_node": 2}
TITAN = {"strategy": "torchtitan", "trainer.n_gpus_per_node": 2}
TENSOR = MEGATRON | {"+engine_kwargs.tensor_model_parallel_size": 2}
RAY = {"trainer.controller": "ray"}
ENGINES = [
    pytest.param(TENSOR, id="megatron_tp2", marks=pytest.mark.megatron),
    pytest.param(TENSOR | RAY, id="megatron_tp2_ray", marks=pytest.mark.megatron),
    pytest.param(
        MEGATRON | {"+engine_kwargs.pipeline_model_parallel_size": 2}, id="megatron_pp2", marks=pytest.mark.megatron
    ),
    pytest.param(TITAN, id="torchtitan_fsdp2", marks=pytest.mark.titan),
    pytest.param(TITAN | RAY, id="torchtitan_fsdp2_ray", marks=pytest.mark.titan),
    pytest.param(TITAN | {"fsdp_config.tensor_parallel_size": 2}, id="torchtitan_tp2", marks=pytest.mark.titan),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_here(num_cpus=4):
        yield


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the overrides of a case, after starting a cluster if its ranks need one."""
    if "trainer.controller" in request.param:
        request.getfixturevalue("cluster")
    return request.param


class Recorder:
    """A tracker that records the metrics of every step that do not depend on the machine."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps.append(deterministic(metrics))


def compare(
    make_trainer: Callable[[dict[str, Any]], SupervisedTrainer[Any, Any]], engine: dict[str, Any], home: Path
) -> None:
    """Compare the metrics of all steps and the final weights of a run with those of the reference engine."""
    results = []
    for name, overrides in (("reference", {}), ("engine", engine)):
        folder, recorder = home / name, Recorder()
        with make_trainer({**RUN, **overrides, "trainer.default_local_dir": folder}) as trainer:
            trainer.prepare()
            trainer.fit(recorder)  # pyright: ignore[reportArgumentType]
        results.append((recorder.steps, saved_weights(folder / f"global_step_{STEPS}" / "model")))
    (expected_steps, expected_weights), (steps, weights) = results
    assert len(expected_steps) == STEPS
    for step, expected in zip(steps, expected_steps, strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-6)
    close(weights, expected_weights, 1e-4)
    assert (home / "engine" / "huggingface" / "model.safetensors").exists()


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_fine_tuning_equals_the_reference_engine(engine: dict[str, Any], tmp_path: Path) -> None:
    heldout = {"data.val_files": tmp_path / "data" / "sft_heldout.parquet"}
    compare(lambda overrides: SFTTrainer(load_sft(sft_args(tmp_path, heldout | overrides))), engine, tmp_path)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_reward_model_training_equals_the_reference_engine(engine: dict[str, Any], tmp_path: Path) -> None:
    """The run starts from a causal language model, so both engines create a score head from the seed."""
    heldout = {"data.val_files": tmp_path / "data" / "preference_heldout.parquet"}
    compare(lambda overrides: RMTrainer(load_rm(rm_args(tmp_path, heldout | overrides))), engine, tmp_path)
