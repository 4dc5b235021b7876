"""Rule of the engine contract about LoRA adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from camshaft.config.engine import LoRAConfig, OptimConfig
from camshaft.contracts.engine.harness import EngineHarness, expect_close, expect_equal
from camshaft.contracts.engine.oracle import oracle_outputs
from camshaft.contracts.rules import expect
from camshaft.engine.base import BaseEngine
from camshaft.errors import EngineError
from camshaft.models.lora import save_adapter

LORA = LoRAConfig(rank=2, alpha=6)


def adapter(harness: EngineHarness) -> None:
    """With LoRA, only the adapter is trained, and weight decay applies only to the adapter. It is merged into exported
    weights and can be disabled. An engine without support for LoRA rejects it."""
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
    _check_weight_decay(harness, changes, base)


def _check_weight_decay(harness: EngineHarness, changes: dict[str, Any], base: dict[str, Tensor]) -> None:
    """Compare an update with weight decay with that of torch.optim.AdamW, and the frozen weights with `base`."""
    optim = OptimConfig(lr=0.1, eps=0.1, weight_decay=0.1)
    engine = harness.build(**changes, optim=optim)
    expected = {name: torch.nn.Parameter(weight) for name, weight in harness.trained_weights(engine).items()}
    for name, gradient in harness.oracle_gradients(engine, "causal_lm")[2].items():
        expected[name].grad = gradient
    torch.optim.AdamW(expected.values(), lr=optim.lr, eps=optim.eps, weight_decay=optim.weight_decay).step()
    harness.train(engine, harness.batch)
    for name, weight in harness.trained_weights(engine).items():
        # The derivative of the update with respect to the gradient is at most lr / eps = 1.
        subject = f"{name} after an update with weight decay"
        expect_close(weight, expected[name].detach(), harness.gradient_tolerance, subject)
    with engine.disable_adapter():
        expect_equal(harness.weights(engine), base, "frozen weights after an update with weight decay")


def _random_adapter(engine: BaseEngine) -> dict[str, Tensor]:
    """Return random adapter weights that change the outputs. They are equal on every rank."""
    generator = torch.Generator().manual_seed(17)
    adapter_weights = engine.named_weights(adapter_only=True)
    return {name: 0.2 * torch.randn(weight.shape, generator=generator) for name, weight in adapter_weights}


def _base_log_probs(harness: EngineHarness) -> Tensor:
    engine = harness.build(lora=None)
    return oracle_outputs(harness.oracle_model(engine, "causal_lm"), harness.batch, "causal_lm")["log_probs"]  # pyright: ignore
