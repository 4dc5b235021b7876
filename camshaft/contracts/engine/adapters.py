"""The rule of the engine contract about LoRA adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from camshaft.config.engine import LoRAConfig
from camshaft.contracts.engine.harness import EngineHarness, close, same_bits
from camshaft.contracts.engine.oracle import plain_outputs
from camshaft.contracts.rules import expect
from camshaft.engine.base import BaseEngine
from camshaft.errors import EngineError
from camshaft.models.lora import save_adapter

LORA = LoRAConfig(rank=2, alpha=6)


def adapter(harness: EngineHarness) -> None:
    """A LoRA adapter trains alone, is merged into exported weights and can be switched off; or is refused by name."""
    try:
        engine = harness.build(lora=LORA)
    except EngineError as error:
        expect("lora" in str(error).lower(), f"an adapter was refused with words that do not name lora: {error}")
        return
    base = harness.weights(harness.build(lora=None))
    same_bits(harness.weights(engine), base, "merged weights of a fresh adapter")
    folder = str(harness.folder / "adapter")
    random = _random(engine)
    harness.on_rank_zero(lambda: save_adapter(random.items(), folder, LORA, str(harness.model_folder)))
    changes: dict[str, Any] = {"lora": LORA.model_copy(update={"adapter_path": folder})}
    engine = harness.build(**changes)
    loss, norm, gradients = harness.plain_gradients(engine, "causal_lm")
    found = harness.step(engine, harness.batch)
    close(torch.tensor(found.loss), torch.tensor(loss), harness.tolerance, "loss with an adapter")
    close(torch.tensor(found.grad_norm), torch.tensor(norm), harness.tolerance * 10, "gradient norm with an adapter")
    for name, gradient in found.gradients.items():
        close(gradient, gradients[name], harness.tolerance * 10, f"gradient of {name}")
    merged = harness.infer(engine)["log_probs"]
    oracle = plain_outputs(harness.plain_model(engine, "causal_lm"), harness.batch, "causal_lm")["log_probs"]
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
    again = harness.build(**changes)
    again.load_checkpoint(str(harness.folder / "trained"))
    same_bits(harness.trained(again), harness.trained(engine), "a loaded adapter")


def _random(engine: BaseEngine) -> dict[str, Tensor]:
    """An adapter that changes something, the same on every rank."""
    random = torch.Generator().manual_seed(17)
    weights = engine.named_weights(adapter_only=True)
    return {name: 0.2 * torch.randn(weight.shape, generator=random) for name, weight in weights}


def _base_log_probs(harness: EngineHarness) -> Tensor:
    engine = harness.build(lora=None)
    return plain_outputs(harness.plain_model(engine, "causal_lm"), harness.batch, "causal_lm")["log_probs"]  # pyright: ignore
