"""Checkpoints and exports of each training engine load in all others, on two ranks.

The tests need Megatron and torchtitan in one environment, which is that of the tests with vLLM. Run by `make
test-titan`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.oracle_runs import TRAINING
from support.ranks import run_ranks

from camshaft.checkpoint.export import Probe, export_hugging_face
from camshaft.contracts.engine.harness import EngineHarness, expect_close, expect_equal
from camshaft.engine import BaseEngine, engine_class

pytestmark = [pytest.mark.megatron, pytest.mark.titan, pytest.mark.vllm, pytest.mark.timeout(600)]

ENGINES: dict[str, dict[str, Any]] = {
    "reference": {},
    "fsdp": {},
    "fsdp1": {},
    "megatron": {"tensor_model_parallel_size": 2},
    "torchtitan": {"pipeline_parallel_degree": 2},
}
"""Options of each engine. Every rank holds a whole reference engine."""


def build(strategy: str, folder: Path, model: str = "model") -> tuple[EngineHarness, BaseEngine]:
    """Build an engine with the weights in `folder/model`."""
    harness = EngineHarness(engine_class(strategy), folder, common_fields={"options": ENGINES[strategy]})
    if model != "model":
        harness.model_folder = folder / model
    return harness, harness.build(**TRAINING)


def exchange(source: str, folder: Path) -> None:
    """Train and save with one engine. Compare the weights and the next step of the others with its own."""
    harness, trained = build(source, folder)
    harness.train(trained, harness.batch)
    weights = harness.weights(trained)
    if source == "reference":
        harness.on_rank_zero(lambda: trained.save_checkpoint(f"{folder}/checkpoint"))
    else:
        harness.save(trained, folder / "checkpoint")
    with trained.eval_mode():
        probe, is_writer = Probe(trained.infer_batch), dist.get_rank() == 0
        export_hugging_face(trained.named_weights(), trained.config.model, folder / "exported", probe, is_writer)
    dist.barrier()
    expected = harness.train(trained, harness.batch)
    expected_weights = harness.weights(trained)
    for strategy in (name for name in ENGINES if name != source):
        other, exported = build(strategy, folder, "exported")
        expect_equal(other.weights(exported), weights, f"export of {source} in {strategy}")
        other, loaded = build(strategy, folder)
        loaded.load_checkpoint(f"{folder}/checkpoint")
        expect_equal(other.weights(loaded), weights, f"checkpoint of {source} in {strategy}")
        step = other.train(loaded, other.batch)
        assert (step.loss, step.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-5)
        for name, weight in other.weights(loaded).items():
            expect_close(weight, expected_weights[name], 1e-5, f"{name} of {source} in {strategy}")


@pytest.mark.parametrize("source", ENGINES)
def test_files_of_one_engine_load_in_all_others(source: str, tmp_path: Path) -> None:
    run_ranks(exchange, 2, source, tmp_path, timeout=500)
