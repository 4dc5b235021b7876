"""Rule of the engine contract about LoRA adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from camshaft.config.engine import LoRAConfig
from camshaft.contracts.engine.harness import EngineHarness, expect_close, expect_equal
from camshaft.contracts.engine.oracle import oracle_outputs
from camshaft.contracts.rules import expect
from camshaft.engine.base import BaseEngine
from camshaft.errors import EngineError
from camshaft.models.lora import save_adapter

LORA = LoRAConfig(rank=2, alpha=6)


def adapter(harness: EngineHarness) -> None:
    """With LoRA, only the adapter is trained. It is merged into exported weights and can be disabled. An engine without
    support for LoRA rejects it."""
    try:
        engine = harness.build(lora=LORA)
    except EngineError as error:
        expect("lora" in str(error).lower(), f"the error about an unsupported adapter does not mention lora: {error}")
        return
    base = harness.weights(harness.build(lora=None))
    expect_equal(harness.weights(engine), base, "merged weights of a new adapter")
    folder = str(harness.folder / "adapter")
    weights = _random_adapter(engine)
    harness.on_rank_zero(lambda: save_adapter(weights.items(), folder, LORA, str(harness.model_folder)))
    changes: dict[str, Any] = {"lora": LORA.model_copy(update={"adapter_path": folder})}
    engine = harness.build(**changes)
    loss, norm, gradients = harness.oracle_gradients(engine, "causal_lm")
    result = harness.step(engine, harness.batch)
    expect_close(result.loss, loss, harness.tolerance, "loss with an adapter")
    expect_close(result.grad_norm, norm, harness.gradient_tolerance, "gradient norm with an adapter")
    for name, gradient in result.gradients.items():
        expect_close(gradient, gradients[name], harness.gradient_tolerance, f"gradient of {name}")
    log_probs = harness.infer(engine)["log_probs"]
    expected = oracle_outputs(harness.oracle_model(engine, "causal_lm"), harness.batch, "causal_lm")["log_probs"]
    expect_close(log_probs, expected, harness.tolerance, "log_probs with an adapter, compared with the merged weights")
    with engine.disable_adapter():
        expect_equal(harness.weights(engine), base, "weights inside disable_adapter after a step")
        expect_close(
            harness.infer(engine)["log_probs"],
            _base_log_probs(harness),
            harness.tolerance,
            "log_probs inside disable_adapter",
        )
    expect_close(harness.infer(engine)["log_probs"], log_probs, 0.0, "log_probs after disable_adapter")
    harness.save(engine, harness.folder / "trained")
    loaded_engine = harness.build(**changes)
    loaded_engine.load_checkpoint(str(harness.folder / "trained"))
    expect_equal(harness.trained_weights(loaded_engine), harness.trained_weights(engine), "a loaded adapter")


def _random_adapter(engine: BaseEngine) -> dict[str, Tensor]:
    """Return random adapter weights that change the outputs. They are equal on every rank."""
    generator = torch.Generator().manual_seed(17)
    adapter_weights = engine.named_weights(adapter_only=True)
    return {name: 0.2 * torch.randn(weight.shape, generator=generator) for name, weight in adapter_weights}


def _base_log_probs(harness: EngineHarness) -> Tensor:
    engine = harness.build(lora=None)
    return oracle_outputs(harness.oracle_model(engine, "causal_lm"), harness.batch, "causal_lm")["log_probs"]  # pyright: ignore
