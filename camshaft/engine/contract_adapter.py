"""The rule of the engine contract about LoRA adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from camshaft.config.engine import LoRAConfig
from camshaft.engine.base import BaseEngine
from camshaft.engine.lab import Lab, close, same_bits
from camshaft.engine.plain import plain_outputs
from camshaft.errors import EngineError
from camshaft.models.lora import save_adapter
from camshaft.rules import expect

LORA = LoRAConfig(rank=2, alpha=6)


def adapter(lab: Lab) -> None:
    """A LoRA adapter trains alone, is merged into exported weights and can be switched off; or is refused by name."""
    try:
        engine = lab.build(lora=LORA)
    except EngineError as error:
        expect("lora" in str(error).lower(), f"an adapter was refused with words that do not name lora: {error}")
        return
    base = lab.weights(lab.build(lora=None))
    same_bits(lab.weights(engine), base, "merged weights of a fresh adapter")
    folder = str(lab.folder / "adapter")
    random = _random(engine)
    lab.on_rank_zero(lambda: save_adapter(random.items(), folder, LORA, str(lab.model_folder)))
    changes: dict[str, Any] = {"lora": LORA.model_copy(update={"adapter_path": folder})}
    engine = lab.build(**changes)
    loss, norm, gradients = lab.plain_gradients(engine, "causal_lm")
    found = lab.step(engine, lab.batch)
    close(torch.tensor(found.loss), torch.tensor(loss), lab.tolerance, "loss with an adapter")
    close(torch.tensor(found.grad_norm), torch.tensor(norm), lab.tolerance * 10, "gradient norm with an adapter")
    for name, gradient in found.gradients.items():
        close(gradient, gradients[name], lab.tolerance * 10, f"gradient of {name}")
    merged = lab.infer(engine)["log_probs"]
    oracle = plain_outputs(lab.plain_model(engine, "causal_lm"), lab.batch, "causal_lm")["log_probs"]
    close(merged, oracle, lab.tolerance, "log_probs with an adapter, against the merged weights")
    with engine.disable_adapter():
        same_bits(lab.weights(engine), base, "weights inside disable_adapter, after a step")
        close(lab.infer(engine)["log_probs"], _base_log_probs(lab), lab.tolerance, "log_probs inside disable_adapter")
    close(lab.infer(engine)["log_probs"], merged, 0.0, "log_probs after disable_adapter")
    lab.save(engine, lab.folder / "trained")
    again = lab.build(**changes)
    again.load_checkpoint(str(lab.folder / "trained"))
    same_bits(lab.trained(again), lab.trained(engine), "a loaded adapter")


def _random(engine: BaseEngine) -> dict[str, Tensor]:
    """An adapter that changes something, the same on every rank."""
    random = torch.Generator().manual_seed(17)
    weights = engine.named_weights(adapter_only=True)
    return {name: 0.2 * torch.randn(weight.shape, generator=random) for name, weight in weights}


def _base_log_probs(lab: Lab) -> Tensor:
    engine = lab.build(lora=None)
    return plain_outputs(lab.plain_model(engine, "causal_lm"), lab.batch, "causal_lm")["log_probs"]  # pyright: ignore
