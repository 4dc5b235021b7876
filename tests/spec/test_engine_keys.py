"""Fields of `EngineConfig` that do not change numbers, so that the engine contract does not cover them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from camshaft.config.engine import OptimConfig
from camshaft.contracts.engine.harness import EngineHarness
from camshaft.dataproto import DataProto
from camshaft.engine import BaseEngine, StepContext, engine_class
from camshaft.engine.optim import learning_rate_at
from camshaft.errors import EngineError

STRATEGIES = ("reference", "fsdp2", "fsdp1")


def passes(harness: EngineHarness, engine: BaseEngine, training: bool) -> list[tuple[int, int]]:
    """Return (rows, tokens) of each micro-batch."""
    sizes: list[tuple[int, int]] = []

    def watch(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        sizes.append((len(data), len(data["input_ids"].values)))
        return data, ctx

    with engine.train_mode() if training else engine.eval_mode():
        engine.forward_backward_step(harness.batch, forward_only=not training, preprocess_fn=watch)
    return sizes


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("training", [True, False])
def test_micro_batch_size_limits_the_rows_of_a_pass(strategy: str, training: bool, tmp_path: Path) -> None:
    harness = EngineHarness(engine_class(strategy), tmp_path)
    limit: dict[str, Any] = {"micro_batch_size" if training else "infer_micro_batch_size": 3}
    assert [rows for rows, _ in passes(harness, harness.build(), training)] == [8]
    assert [rows for rows, _ in passes(harness, harness.build(**limit), training)] == [3, 3, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("training", [True, False])
def test_max_tokens_limits_the_tokens_of_a_pass(strategy: str, training: bool, tmp_path: Path) -> None:
    harness = EngineHarness(engine_class(strategy), tmp_path)
    limit: dict[str, Any] = {"max_tokens" if training else "infer_max_tokens": 20}
    sizes = passes(harness, harness.build(**limit), training)
    assert len(sizes) >= math.ceil(59 / 20)
    assert max(tokens for _, tokens in sizes) <= 20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_have_the_configured_dtype(strategy: str, tmp_path: Path) -> None:
    harness = EngineHarness(engine_class(strategy), tmp_path)
    for dtype in ("float32", "bfloat16", "float64"):
        engine: Any = harness.build(forward_only=True, dtype=dtype)
        assert {p.dtype for p in engine.module.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_model_is_built_on_the_configured_device(strategy: str, tmp_path: Path) -> None:
    """An unavailable device is an error."""
    harness = EngineHarness(engine_class(strategy), tmp_path)
    assert {weight.device.type for _, weight in harness.build().named_weights()} == {"cpu"}
    with pytest.raises(EngineError, match="device=xpu is not available"):
        harness.build(device="xpu")


@pytest.mark.parametrize("strategy", ["reference", "fsdp2"])
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_to_moves_the_selected_parts(strategy: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for another device, which a machine with a CPU only does not have."""
    monkeypatch.setattr("camshaft.engine.torch_engine.available_device", torch.device)
    harness = EngineHarness(engine_class(strategy), tmp_path)
    engine: Any = harness.build()
    harness.train(engine, harness.batch)
    assert places(engine) == {"model": {"cpu"}, "optimizer": {"cpu"}}
    engine.to("meta", model=part == "model", optimizer=part == "optimizer")
    assert places(engine) == {"model": {"cpu"}, "optimizer": {"cpu"}} | {part: {"meta"}}


def places(engine: Any) -> dict[str, set[str]]:
    """Return the device types of the parameters and of the optimizer state, except its step counters."""
    states = [value for state in engine.optimizer.state.values() for name, value in state.items() if name != "step"]
    return {
        "model": {p.device.type for p in engine.module.parameters()},
        "optimizer": {value.device.type for value in states},
    }


def test_num_cycles_is_the_number_of_cosine_cycles() -> None:
    def rates(**changes: Any) -> list[float]:
        optim = OptimConfig(lr=1.0, lr_scheduler_type="cosine", total_training_steps=4, **changes)
        return [learning_rate_at(optim, k) for k in range(5)]

    # (1 + cos(2 pi cycles k / 4)) / 2: half a cycle decays once, a full cycle rises again.
    assert rates() == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0])
    assert rates(num_cycles=1.0) == pytest.approx([1, 0.5, 0, 0.5, 1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_classic_training_loop_runs_on_every_engine(strategy: str, tmp_path: Path) -> None:
    """Clear gradients, run forward and backward, then step optimizer and schedule outside of train_mode."""
    harness = EngineHarness(engine_class(strategy), tmp_path)
    engine: Any = harness.build(optim=OptimConfig(lr=1e-2))
    losses: list[float] = []
    for _ in range(4):
        engine.optimizer_zero_grad()
        assert all(p.grad is None or not p.grad.any() for p in engine.module.parameters())
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(harness.batch, None, forward_only=False)
        assert any(p.grad is not None and p.grad.any() for p in engine.module.parameters())
        assert engine.optimizer_step() > 0
        assert engine.lr_scheduler_step() == 1e-2
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(harness.batch, None, forward_only=True)
    assert len(predictions["log_probs"]) == len(harness.batch)
