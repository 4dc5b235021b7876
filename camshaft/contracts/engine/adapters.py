"""Rule of the engine contract about LoRA adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from camshaft.config.engine import LoRAConfig
from camshaft.contracts.engine.harness import EngineHarness, close, same_bits
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
    same_bits(harness.weights(engine), base, "merged weights of a fresh adapter")
    folder = str(harness.folder / "adapter")
    weights = _random_adapter(engine)
    harness.on_rank_zero(lambda: save_adapter(weights.items(), folder, LORA, str(harness.model_folder)))
    changes: dict[str, Any] = {"lora": LORA.model_copy(update={"adapter_path": folder})}
    engine = harness.build(**changes)
    loss, norm, gradients = harness.oracle_gradients(engine, "causal_lm")
    result = harness.step(engine, harness.batch)
    close(result.loss, loss, harness.tolerance, "loss with an adapter")
    close(result.grad_norm, norm, harness.gradient_tolerance, "gradient norm with an adapter")
    for name, gradient in result.gradients.items():
        close(gradient, gradients[name], harness.gradient_tolerance, f"gradient of {name}")
    merged = harness.infer(engine)["log_probs"]
    oracle = oracle_outputs(harness.oracle_model(engine, "causal_lm"), harness.batch, "causal_lm")["log_probs"]
    close(merged, oracle, harness.tolerance, "log_probs with an adapter, against the merged weights")
    with engine.disable_adapter():
        same_bits(harness.weights(engine), base, "weights inside disable_adapter, after a step")
        close(
            harness.infer(engine)["log_probs"],
            _base_log_probs(harness),
            harness.tolerance,
            "log_probs inside disable_adapter",
        )
    close(harness.infer(engine)["log_probs"], merged, 0.0, "log_probs after disable_adapter")
    harness.save(engine, harness.folder / "trained")
    loaded = harness.build(**changes)
    loaded.load_checkpoint(str(harness.folder / "trained"))
    same_bits(harness.trained(loaded), harness.trained(engine), "a loaded adapter")


def _random_adapter(engine: BaseEngine) -> dict[str, Tensor]:
    """Draw an adapter that changes the outputs, the same on every rank."""
    random = torch.Generator().manual_seed(17)
    adapter_weights = engine.named_weights(adapter_only=True)
    return {name: 0.2 * torch.randn(weight.shape, generator=random) for name, weight in adapter_weights}


def _base_log_probs(harness: EngineHarness) -> Tensor:
    engine = harness.build(lora=None)
    return oracle_outputs(harness.oracle_model(engine, "causal_lm"), harness.batch, "causal_lm")["log_probs"]  # pyright: ignore
