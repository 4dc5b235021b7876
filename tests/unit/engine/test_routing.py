"""Auxiliary loss, metrics and replay of the routers of a mixture of experts."""

import math
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from support.moe import MODELS, MoEHarness, load_oracle, random_experts, replay_oracle, replay_step
from support.ranks import run_warm_ranks
from support.tiny import tiny_folder
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from camshaft.config.engine import EngineCapabilities, EngineConfig, EngineModel
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import engine_class
from camshaft.engine.context import StepContext
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import EngineError
from camshaft.models.packing import Packing

COEFFICIENT = 0.7


class _Observed:
    """Router logits of a transformers model, in float64 and with gradients."""

    def __init__(self, hf: nn.Module):
        self.logits: list[Tensor] = []
        routers = [module for module in hf.modules() if type(module).__name__.endswith("TopKRouter")]
        for router in routers:
            router.register_forward_hook(lambda module, args, output: self.logits.append(output[0].double()))


def _oracle(harness: MoEHarness, batch: DataProto) -> tuple[float, dict[str, Tensor]]:
    """Return the auxiliary loss of transformers and its gradients, with all rows right-padded in one batch."""
    model = load_oracle(harness.model_folder)
    observed = _Observed(model)
    ids = batch.ragged("input_ids")
    model(input_ids=ids.padded("right"), attention_mask=ids.mask("right").long(), use_cache=False)
    config: Any = model.config
    experts = harness.sizes.get("num_experts", harness.sizes.get("num_local_experts"))
    mask = ids.mask("right").double()
    logits: Any = tuple(observed.logits)
    loss: Any = load_balancing_loss_func(logits, experts, config.num_experts_per_tok, mask)
    model.zero_grad()
    loss.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return float(loss.detach()), gradients


def _aux_step(strategy: str, folder: str, sizes: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Run one step whose loss is only the auxiliary loss."""
    harness = MoEHarness(engine_class(strategy), folder, {"router_aux_loss_coef": COEFFICIENT} | fields, sizes)
    engine = harness.build()
    engine.set_loss_fn(lambda data, outputs, ctx: (outputs["log_probs"].values.sum() * 0 / ctx["num_tokens"], ctx))
    step = harness.step(engine, harness.shared_prompt_batch)
    return {"loss": step.loss, "metrics": step.metrics, "gradients": step.gradients}


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("reference", 1, {}),
    "rows": ("reference", 1, {"micro_batch_size": 2, "enable_gradient_checkpointing": True}),
    "tokens": ("reference", 1, {"max_tokens": 24}),
    "separate": ("reference", 1, {"use_prefix_grouper": False}),
    "fsdp": ("fsdp", 2, {"micro_batch_size": 3}),
    "fsdp-one": ("fsdp", 2, {"enable_gradient_checkpointing": True}),
    "fsdp1": ("fsdp1", 2, {"micro_batch_size": 2}),
    "sequence": ("fsdp", 2, {"micro_batch_size": 3, "options": {"ulysses_sequence_parallel_size": 2}}),
    "dummies": ("fsdp", 2, {"max_tokens": 17}),
}
FAST = {("mixed", "one"), ("mixed", "rows"), ("mixed", "fsdp")}
FAST_REPLAY = {("mixed", "rows"), ("mixed", "sequence")}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, name, marks=() if (model, name) in FAST else pytest.mark.slow)
        for model in MODELS
        for name in LAYOUTS
    ],
)
def test_auxiliary_loss_equals_that_of_transformers_in_every_split(model: str, layout: str, tmp_path: Path) -> None:
    strategy, world, fields = LAYOUTS[layout]
    harness = MoEHarness(engine_class("reference"), tmp_path, None, MODELS[model])
    expected, gradients = _oracle(harness, harness.shared_prompt_batch)
    arguments = strategy, str(tmp_path), MODELS[model], fields
    step = _aux_step(*arguments) if world == 1 else run_warm_ranks(_aux_step, world, *arguments, timeout=240)[0]
    assert step["loss"] == pytest.approx(COEFFICIENT * expected, rel=1e-6)
    assert step["metrics"]["moe/aux_loss"] == pytest.approx(expected, rel=1e-6)
    routers = 0
    for name, gradient in step["gradients"].items():
        torch.testing.assert_close(
            gradient, COEFFICIENT * gradients[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m
        )
        routers += name.endswith("gate.weight") and bool(gradient.any())
    assert routers >= 2


def test_balanced_and_collapsed_routers_have_known_metrics(tmp_path: Path) -> None:
    """A router with equal logits chooses experts 0 and 1 of 4 for every token, with probabilities of a quarter."""
    harness = MoEHarness(engine_class("reference"), tmp_path, None, MODELS["mixtral"])
    engine = harness.build()
    for name, parameter in engine.module.weight_parameters().items():  # pyright: ignore[reportAttributeAccessIssue]
        if name.endswith("gate.weight"):
            parameter.data.zero_()
    metrics = harness.train(engine, harness.batch).metrics
    assert metrics["moe/router_entropy"] == pytest.approx(math.log(4), rel=1e-6)
    assert metrics["moe/aux_loss"] == pytest.approx(2.0, rel=1e-6)  # E sum_e f_e P_e = 4 * (1/4 + 1/4)
    assert metrics["moe/max_vio"] == pytest.approx(1.0)  # (N - N / 2) / (N / 2)
    assert metrics["moe/avg_vio"] == pytest.approx(1.0)


def test_a_dense_model_rejects_the_coefficient() -> None:
    model = EngineModel(path=str(tiny_folder("qwen2")), router_aux_loss_coef=0.001)
    engine = engine_class("reference")(EngineConfig(model=model))
    with pytest.raises(EngineError, match=r"router_aux_loss_coef=0\.001 requires a mixture of experts"):
        engine.init_model()


def test_an_engine_without_the_auxiliary_loss_rejects_the_coefficient() -> None:
    class Plain(SingleDeviceEngine):
        capabilities = EngineCapabilities()

    model = EngineModel(path="models/moe", router_aux_loss_coef=0.001)
    with pytest.raises(EngineError, match=r"router_aux_loss_coef=0\.001 is not supported.*router_aux_loss_coef=0"):
        Plain(EngineConfig(model=model))


def test_config_value_of_the_model_is_not_used(tmp_path: Path) -> None:
    sizes = MODELS["mixtral"]
    losses = []
    for number, coefficient in enumerate((0.0, 5.0)):
        config = sizes | {"router_aux_loss_coef": coefficient, "output_router_logits": True}
        harness = MoEHarness(engine_class("reference"), tmp_path / str(number), None, config)
        losses.append(harness.train(harness.build(), harness.batch).loss)
    assert losses[0] == losses[1]


def test_inference_in_a_hook_leaves_loss_and_metrics_of_the_step(tmp_path: Path) -> None:
    harness = MoEHarness(
        engine_class("reference"),
        tmp_path,
        {"router_aux_loss_coef": COEFFICIENT, "micro_batch_size": 3},
        MODELS["mixtral"],
    )
    usual, nested = harness.build(), harness.build()

    def infer(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        nested.infer_batch(data)
        return data, ctx

    with usual.train_mode(), nested.train_mode():
        expected = usual.train_batch(harness.batch)
        result = nested.train_batch(harness.batch, preprocess_fn=infer)
    assert (result.loss, result.metrics) == (expected.loss, expected.metrics)
    assert "moe/aux_loss" in result.metrics


# -- comparison and replay ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, name, marks=() if (model, name) in FAST_REPLAY else pytest.mark.slow)
        for model in MODELS
        for name in LAYOUTS
    ],
)
def test_replay_equals_a_plain_implementation_with_its_own_gate_weights(
    model: str, layout: str, tmp_path: Path
) -> None:
    (strategy, world, fields), sizes = LAYOUTS[layout], MODELS[model]
    harness = MoEHarness(engine_class("reference"), tmp_path, None, sizes)
    batch = harness.shared_prompt_batch
    rows, gradients = replay_oracle(harness, batch.with_columns(routed_experts=random_experts(batch, sizes)))
    arguments = strategy, str(tmp_path), sizes, fields
    step = replay_step(*arguments) if world == 1 else run_warm_ranks(replay_step, world, *arguments, timeout=240)[0]
    torch.testing.assert_close(step["predictions"]["log_probs"].values, torch.cat(rows), rtol=1e-5, atol=1e-5)
    mismatch = step["predictions"]["routing_mismatch"].values
    assert 0.2 < float(mismatch.max()) <= 1
    for name, gradient in step["gradients"].items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)
        assert not name.endswith("gate.weight") or bool(gradient.any()), name


def _choices_of(engine: Any, batch: DataProto) -> Ragged:
    """Return the engine's own choices as a column, from an inference of each row."""
    rows = []
    for row in range(len(batch)):
        ids = batch.reorder([row])["input_ids"].values
        engine.module.routers.start()
        with torch.no_grad():
            engine.module(ids, Packing([len(ids)]), torch.empty(0, dtype=torch.int64), ("log_probs",))
        choices = torch.stack([layer.choices for layer in engine.module.routers.finish()], dim=1)
        rows.append(choices.to(torch.uint8))
    return Ragged.from_rows(rows)


@pytest.mark.parametrize("model", MODELS)
def test_replay_of_the_routers_own_choices_changes_no_bit(model: str, tmp_path: Path) -> None:
    harness = MoEHarness(engine_class("reference"), tmp_path, {"infer_micro_batch_size": 3}, MODELS[model])
    engine = harness.build(forward_only=True)
    batch = harness.shared_prompt_batch
    column = _choices_of(engine, batch)
    usual = harness.infer(engine, None, batch)["log_probs"]
    replayed = harness.infer(engine, StepContext(routing="replay"), batch.with_columns(routed_experts=column))
    assert isinstance(usual, Ragged)
    assert torch.equal(replayed["log_probs"].values, usual.values)  # pyright: ignore
    assert not replayed["routing_mismatch"].values.any()  # pyright: ignore


@pytest.mark.parametrize("checkpointing", [False, True])
def test_inference_in_a_hook_leaves_the_replay_of_the_step(checkpointing: bool, tmp_path: Path) -> None:
    """The hook infers with the routers' own choices. The micro-batches differ in length."""
    fields = {"micro_batch_size": 2, "enable_gradient_checkpointing": checkpointing}
    harness = MoEHarness(engine_class("reference"), tmp_path, fields, MODELS["mixtral"])
    separate, usual, nested = harness.build(forward_only=True), harness.build(), harness.build()
    batch = harness.shared_prompt_batch
    batch = batch.with_columns(routed_experts=random_experts(batch, MODELS["mixtral"]))
    inferred: list[bool] = []

    def infer(data: DataProto, ctx: StepContext) -> tuple[DataProto, StepContext]:
        expected, result = (engine.infer_batch(data)["log_probs"] for engine in (separate, nested))
        inferred.append(torch.equal(result.values, expected.values))
        return data, ctx

    ctx = StepContext(routing="replay")
    expected, result = harness.step(usual, batch, ctx), harness.step(nested, batch, ctx, preprocess_fn=infer)
    assert len(inferred) > 1
    assert all(inferred)
    assert result.loss == expected.loss
    for name, gradient in expected.gradients.items():
        assert torch.equal(result.gradients[name], gradient), name


def test_a_failed_step_ends_its_replay(tmp_path: Path) -> None:
    harness = MoEHarness(engine_class("reference"), tmp_path, {}, MODELS["mixtral"])
    engine = harness.build()
    batch = harness.shared_prompt_batch
    usual = harness.infer(engine, None, batch)["log_probs"]

    def fail(*_: object) -> NoReturn:
        raise ArithmeticError

    engine.set_loss_fn(fail)
    experts = random_experts(batch, MODELS["mixtral"])
    with pytest.raises(ArithmeticError):
        engine.train_batch(batch.with_columns(routed_experts=experts), StepContext(routing="replay", num_tokens=1))
    assert isinstance(usual, Ragged)
    assert torch.equal(harness.infer(engine, None, batch)["log_probs"].values, usual.values)  # pyright: ignore


def test_comparison_counts_choices_at_the_token_before() -> None:
    """Of two layers with two choices, the token before the counted one differs in one choice."""
    sizes = MODELS["mixtral"]
    engine = engine_class("reference")(EngineConfig(model=EngineModel(path=str(tiny_folder(**sizes)))))
    engine.init_model()
    ids = Ragged.from_rows([torch.tensor([5, 6, 7, 8])])
    batch = DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(torch.tensor([0, 0, 1, 1]).bool())})
    column = _choices_of(engine, batch)
    other = next(expert for expert in range(4) if expert not in column.values[1, 0].tolist())
    column.values[1, 0, 0] = other
    column.values[1] = column.values[1].flip(-1)  # the order of choices does not matter
    column.values[2] = 255  # not computed by the rollout
    result = engine.infer_batch(batch.with_columns(routed_experts=column), StepContext(routing="compare"))
    assert result["routing_mismatch"].values.tolist() == [0, 0, 0.25, 0]
    assert torch.equal(result["log_probs"].values, engine.infer_batch(batch)["log_probs"].values)


def test_routing_requires_routers_and_an_engine_that_supports_it() -> None:
    class Plain(SingleDeviceEngine):
        capabilities = EngineCapabilities()

    batch = MoEHarness(SingleDeviceEngine, ".").shared_prompt_batch
    for cls, folder in ((SingleDeviceEngine, tiny_folder("qwen2")), (Plain, tiny_folder(**MODELS["mixtral"]))):
        engine = cls(EngineConfig(model=EngineModel(path=str(folder))))
        engine.init_model()
        with pytest.raises(
            EngineError, match=r"ctx\['routing'\]=replay requires an engine that supports router replay"
        ):
            engine.infer_batch(batch, StepContext(routing="replay"))
