"""Rules of the engine contract about LoRA adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from camshaft.config.engine import LoRAConfig, OptimConfig
from camshaft.contracts.engine.harness import EngineHarness, expect_close, expect_equal
from camshaft.contracts.engine.oracle import oracle_outputs
from camshaft.contracts.rules import expect, expect_error
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


def adapter_groups(harness: EngineHarness) -> None:
    """train_attn, train_mlp and train_unembed of LoRAConfig select the adapted layers, and its seed alone decides the
    initial adapter. notices names a head that is not adapted, because the model ties its embeddings. An engine without
    support for these fields rejects each of them by name."""
    capabilities = harness.engine_class.capabilities
    if not capabilities.supports_lora:
        return
    without_attention, without_mlp = (LORA.model_copy(update={name: False}) for name in ("train_attn", "train_mlp"))
    with_head, seeded = (LORA.model_copy(update=field) for field in ({"train_unembed": True}, {"seed": 71}))
    if not capabilities.supports_lora_groups:
        for config in (without_attention, without_mlp, with_head, seeded):
            (name,) = config.group_fields()
            expect_error(lambda config=config: harness.build(lora=config), name, f"the engine accepted lora.{name}")
        return
    expect_layers(harness.build(lora=without_attention), {"mlp"})
    expect_layers(harness.build(lora=without_mlp), {"self_attn"})
    tied = harness.build(lora=with_head)
    expect_layers(tied, {"mlp", "self_attn"})
    sentences = " ".join(tied.notices())
    expect(
        "train_unembed" in sentences,
        f"notices of a model with tied embeddings do not mention train_unembed: {sentences}",
    )
    untied: dict[str, Any] = {"override_config": {"tie_word_embeddings": False}, "random_init": True}
    engine = harness.build(lora=with_head, **untied)
    expect_layers(engine, {"mlp", "self_attn", "lm_head"})
    expect(not engine.notices(), f"notices of a model whose head is adapted are {engine.notices()}")
    before = harness.trained_weights(engine)
    harness.train(engine, harness.batch)
    after = harness.trained_weights(engine)
    unchanged = [name for name, weight in after.items() if "lora_B" in name and torch.equal(weight, before[name])]
    expect(not unchanged, f"a step did not change {', '.join(unchanged)}")
    of_seeds = [harness.trained_weights(harness.build(lora=seeded, seed=seed)) for seed in (5, 6)]
    expect_equal(of_seeds[0], of_seeds[1], "initial adapters of the same lora.seed and different seeds of the engine")
    others = harness.trained_weights(harness.build(lora=LORA.model_copy(update={"seed": 72})))
    equal = all(torch.equal(weight, others[name]) for name, weight in of_seeds[0].items())
    expect(not equal, "initial adapters do not depend on lora.seed")


def expect_layers(engine: BaseEngine, expected: set[str]) -> None:
    """Raise `Violation` unless exactly the layers in modules of these names have adapters."""
    layers = {name.rpartition(".lora_")[0] for name, _ in engine.named_weights(adapter_only=True)}
    modules = {part for layer in layers for part in layer.split(".") if part in ("self_attn", "mlp", "lm_head")}
    expect(modules == expected, f"with {engine.config.model.lora}, the adapted layers are in {sorted(modules)}")


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
