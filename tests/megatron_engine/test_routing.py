"""Losses and replay of routers on Megatron engines equal those of transformers in every layout, on gloo ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.moe import MODELS, MoEHarness, load_oracle, random_experts, replay_oracle, replay_step
from support.ranks import run_warm_ranks
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from camshaft.dataproto import DataProto
from camshaft.engine import engine_class

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

TENSOR, PIPELINE, CONTEXT = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EXPERT, VIRTUAL = "expert_model_parallel_size", "virtual_pipeline_model_parallel_size"
OPTIONS = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2}
COEFFICIENT = 0.7

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, {}),
    "checkpointed": (1, {}, {"micro_batch_size": 2, "enable_gradient_checkpointing": True}),
    "data_and_expert": (2, {EXPERT: 2}, {"max_tokens": 17}),
    "tensor": (2, {TENSOR: 2}, {"micro_batch_size": 2}),
    "context": (2, {CONTEXT: 2}, {"micro_batch_size": 3}),
    "pipeline": (2, {PIPELINE: 2}, {"micro_batch_size": 2}),
    "checkpointed_pipeline": (2, {PIPELINE: 2}, {"micro_batch_size": 2, "enable_gradient_checkpointing": True}),
    "interleaved": (2, {PIPELINE: 2, VIRTUAL: 2}, {"micro_batch_size": 2}),
}
"""Number of ranks, options of the engine, and fields of its config."""
FAST = {"tensor", "checkpointed_pipeline"}


def oracle(harness: MoEHarness, batch: DataProto) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the losses of transformers and the gradients of their weighted sum, in float64, with padded rows."""
    model = load_oracle(harness.model_folder).double()
    observed: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda module, args, output: observed.append(output[0]))
    ids = batch.ragged("input_ids")
    mask = ids.mask("right")
    model(input_ids=ids.padded("right"), attention_mask=mask.long(), use_cache=False)
    experts, top_k = observed[0].shape[-1], model.config.num_experts_per_tok
    logits: Any = tuple(observed)
    losses: dict[str, Any] = {"aux": load_balancing_loss_func(logits, experts, top_k, mask.double())}
    counted = mask.flatten()
    losses["moe"] = sum(
        load_balancing_loss_func((logits,), experts, top_k, mask.double()) / top_k  # pyright: ignore[reportOperatorIssue]
        for logits in observed
    )
    losses["z"] = sum(torch.logsumexp(logits[counted], dim=-1).square().mean() for logits in observed)
    total = COEFFICIENT * losses["aux"] + OPTIONS["moe_aux_loss_coeff"] * losses["moe"]
    total = total + OPTIONS["moe_z_loss_coeff"] * losses["z"]
    total.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {name: float(loss.detach()) for name, loss in losses.items()} | {"total": float(total.detach())}, gradients


def router_step(folder: str, sizes: dict[str, Any], options: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Run one step whose loss is only that of the routers."""
    fields = {"router_aux_loss_coef": COEFFICIENT, "options": OPTIONS | options} | fields
    harness = MoEHarness(engine_class("megatron"), folder, fields, sizes)
    engine = harness.build()
    engine.set_loss_fn(lambda data, outputs, ctx: (outputs["log_probs"].values.sum() * 0 / ctx["num_tokens"], ctx))
    step = harness.step(engine, harness.shared_prompt_batch)
    return {"loss": step.loss, "metrics": step.metrics, "gradients": step.gradients}


EVERY_LAYOUT = pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LAYOUTS]
)


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
@EVERY_LAYOUT
def test_router_losses_equal_those_of_transformers(layout: str, model: str, tmp_path: Path) -> None:
    world, options, fields = LAYOUTS[layout]
    sizes = MODELS[model] | ({"layers": 4} if VIRTUAL in options else {})
    harness = MoEHarness(engine_class("reference"), tmp_path, None, sizes)
    losses, gradients = oracle(harness, harness.shared_prompt_batch)
    step = run_warm_ranks(router_step, world, str(tmp_path), sizes, options, fields, timeout=240)[0]
    assert step["loss"] == pytest.approx(losses["total"], rel=1e-6)
    assert step["metrics"]["moe/aux_loss"] == pytest.approx(losses["aux"], rel=1e-6)
    assert step["metrics"]["moe/z_loss"] == pytest.approx(losses["z"], rel=1e-6)
    assert gradients.keys() == step["gradients"].keys()
    assert all(gradients[name].abs().max() > 1e-3 for name in gradients if name.endswith("gate.weight"))
    for name, gradient in step["gradients"].items():
        expected = gradients[name].float()
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("is_normalized", [True, False])
@EVERY_LAYOUT
def test_replay_equals_a_plain_implementation(layout: str, is_normalized: bool, tmp_path: Path) -> None:
    world, options, fields = LAYOUTS[layout]
    sizes = MODELS["qwen3_moe"] | {"norm_topk_prob": is_normalized, "layers": 4 if VIRTUAL in options else 2}
    harness = MoEHarness(engine_class("reference"), tmp_path, None, sizes)
    batch = harness.shared_prompt_batch
    batch = batch.with_columns(routed_experts=random_experts(batch, sizes))
    rows, gradients = replay_oracle(harness, batch)
    arguments = "megatron", str(tmp_path), sizes, {"options": options} | fields
    step = run_warm_ranks(replay_step, world, *arguments, timeout=240)[0]
    torch.testing.assert_close(step["predictions"]["log_probs"].values, torch.cat(rows), rtol=1e-5, atol=1e-5)
    usual = replay_step("reference", str(tmp_path), sizes, {})
    mismatch = step["predictions"]["routing_mismatch"].values
    torch.testing.assert_close(mismatch, usual["predictions"]["routing_mismatch"].values)
    for name, gradient in step["gradients"].items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)
