"""The `reference` engine computes in bfloat16 and trains float32 weights."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.emulated_cuda import DEVICE, emulated_cuda
from support.ranks import run_warm_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.config.engine import EngineConfig, EngineModel, LoRAConfig, OptimConfig
from camshaft.contracts.engine import harness as contract
from camshaft.contracts.engine.harness import EngineHarness, Tolerances
from camshaft.contracts.engine.oracle import loss_sums, oracle_outputs, oracle_step
from camshaft.contracts.engine.suite import RULES
from camshaft.contracts.rules import Rule
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import engine_class
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import EngineError

OPTIONS = {"mixed_precision": {"param_dtype": "bfloat16"}}
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-2, "weight_decay": 0.1}
"""eps is as large as typical gradients, so the division by their size does not amplify the rounding of small ones."""
FACTOR = 4
"""Accepted difference from the oracle, as a multiple of the oracle's rounding error in bfloat16."""


class BFloat16Harness(EngineHarness):
    """Tests an engine that computes in bfloat16, with the rounding error of the oracle in bfloat16 as tolerance."""

    def __init__(self, folder: Path):
        super().__init__(SingleDeviceEngine, folder, common_fields={"options": OPTIONS})

    @property
    def tolerances(self) -> Tolerances:
        return bfloat16_tolerances(self.model_folder)


TOLERANCES: list[Tolerances] = []
"""Tolerances, after the first measurement. All harnesses have the same model."""


def bfloat16_tolerances(model_folder: Path) -> Tolerances:
    """Measure the rounding error of the oracle in bfloat16, once per process."""
    if TOLERANCES:
        return TOLERANCES[0]
    batch, output_error, gradient_error = contract.make_batch(), 0.0, 0.0
    for head, model in contract._oracle_models(model_folder).items():
        exact, rounded = model.eval(), copy.deepcopy(model).eval().bfloat16()
        expected = oracle_outputs(exact, batch, head, temperature=0.7)
        for name, value in oracle_outputs(rounded, batch, head, temperature=0.7).items():
            output_error = max(output_error, contract.difference(value, expected[name]))
        gradients = oracle_step(exact, batch, head)[2]
        for name, gradient in oracle_step(rounded, batch, head)[2].items():
            gradient_error = max(gradient_error, contract.difference(gradient, gradients[name]))
    TOLERANCES.append(Tolerances(FACTOR * output_error, FACTOR * gradient_error))
    return TOLERANCES[0]


FAST = {"step equals oracle", "split invariance", "resume is bitwise"}
# The gradient of an adapter is that of the merged weights times a factor, so it has another rounding error.
CONTRACT = [rule for rule in RULES if rule.name != "adapter"]


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, id=rule.name.replace(" ", "_"), marks=[pytest.mark.slow] * (rule.name not in FAST))
        for rule in CONTRACT
    ],
)
def test_engine_keeps_rule_in_bfloat16(rule: Rule, tmp_path: Path) -> None:
    rule.check(BFloat16Harness(tmp_path))


def build(folder: str, strategy: str = "reference", **fields: Any) -> Any:
    optim = OptimConfig(**ADAMW)
    config = EngineConfig(model=EngineModel(path=folder, **fields.pop("model", {})), optim=optim, **fields)
    engine: Any = engine_class(strategy)(config)
    engine.init_model()
    return engine


def train(engine: Any, harness: EngineHarness, steps: int = 3) -> dict[str, Any]:
    """Run optimizer steps; return losses, gradient norms and the trained weights."""
    engine.set_loss_fn(harness.loss_fn("causal_lm"))
    results = []
    with engine.train_mode():
        for _ in range(steps):
            results.append(engine.train_batch(harness.batch))
    trained = engine.named_weights(adapter_only=engine.config.model.lora is not None)
    weights = {name: weight.clone().cpu() for name, weight in trained}
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results], "weights": weights}


def plain_training(folder: Path, batch: DataProto, steps: int = 3) -> dict[str, Any]:
    """Train float32 weights with AdamW written out, on gradients that transformers computes in bfloat16."""
    half = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").bfloat16().eval()
    exact = AutoModelForCausalLM.from_pretrained(folder)
    weights = {name: p.detach().clone() for name, p in exact.named_parameters()}
    (low, high), losses = ADAMW["betas"], []
    means = {name: torch.zeros_like(w) for name, w in weights.items()}
    squares = {name: torch.zeros_like(w) for name, w in weights.items()}
    num_tokens = float(batch["loss_mask"].values.sum())
    num_sequences = float((batch["loss_mask"].map(Tensor.float).sum() > 0).sum())
    for step in range(1, steps + 1):
        gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        loss = 0.0
        for row in (batch.reorder([index]) for index in range(len(batch))):
            for name, p in half.named_parameters():
                p.data.copy_(weights[name])
                p.grad = None
            logits: Any = half(input_ids=row["input_ids"].values[None], use_cache=False).logits[0, :-1].float()
            chosen = logits.log_softmax(-1).gather(-1, row["input_ids"].values[1:, None])[:, 0]
            log_probs = row["input_ids"].like(torch.cat([chosen.new_zeros(1), chosen]))
            tokens, sequences = loss_sums({"log_probs": log_probs}, row, "causal_lm")
            share = tokens / num_tokens + sequences / num_sequences
            share.backward()
            loss += float(share.detach())
            for name, p in half.named_parameters():
                gradients[name] += 0 if p.grad is None else p.grad.float()
        losses.append(loss)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        for name, weight in weights.items():
            g = gradients[name] * min(1.0, 1.0 / norm)
            means[name] = low * means[name] + (1 - low) * g
            squares[name] = high * squares[name] + (1 - high) * g * g
            scale = (squares[name] / (1 - high**step)).sqrt() + ADAMW["eps"]
            weight *= 1 - ADAMW["lr"] * ADAMW["weight_decay"]
            weight -= ADAMW["lr"] * means[name] / (1 - low**step) / scale
    return {"losses": losses, "weights": weights}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the norm of the difference between two sets of weights."""
    return math.sqrt(sum(float((a[name] - b[name]).double().square().sum()) for name in b))


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> EngineHarness:
    return EngineHarness(SingleDeviceEngine, tmp_path_factory.mktemp("mixed"))


def test_adamw_steps_equal_a_plain_loop(harness: EngineHarness) -> None:
    """Both round to bfloat16, in different places: about ten roundings of up to 2**-9 from a weight to its gradient."""
    folder = str(harness.model_folder)
    expected = plain_training(harness.model_folder, harness.batch)
    start = {name: w.clone() for name, w in build(folder).named_weights()}
    actual = train(build(folder, options=OPTIONS), harness)
    exact = train(build(folder), harness)
    assert actual["losses"] != exact["losses"]
    assert actual["losses"] == pytest.approx(expected["losses"], rel=3 * 2**-8, abs=3 * 2**-8)
    assert {weight.dtype for weight in actual["weights"].values()} == {torch.float32}
    assert distance(actual["weights"], expected["weights"]) < 10 * 2**-9 * distance(expected["weights"], start)


def test_adamw_updates_float32_weights_with_float32_gradients(harness: EngineHarness) -> None:
    """The first update is -lr (g / (|g| + eps) + weight_decay w), in float32."""
    engine = build(str(harness.model_folder), options=OPTIONS, grad_clip=1e9)
    parameters = engine.named_parameters()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    engine.set_loss_fn(harness.loss_fn("causal_lm"))
    with engine.train_mode():
        engine.forward_backward_step(harness.batch)
        gradients = {name: p.grad.clone() for name, p in parameters.items()}
        engine.optimizer_step()
    assert {g.dtype for g in gradients.values()} == {p.dtype for p in parameters.values()} == {torch.float32}
    for name, w in before.items():
        g = gradients[name].double()
        moved = ADAMW["lr"] * (g / (g.abs() + ADAMW["eps"]) + ADAMW["weight_decay"] * w.double())
        torch.testing.assert_close(parameters[name].double(), w.double() - moved, rtol=0, atol=2e-7)
    state = engine.optimizer.state.values()
    assert {s["exp_avg"].dtype for s in state} == {torch.float32}


def test_gradients_of_micro_batches_are_summed_in_float32(harness: EngineHarness) -> None:
    def loss_fn(_: DataProto, predictions: Any, ctx: Any) -> Any:
        assert ctx["num_tokens"] > 0  # a sum does not depend on the split
        return predictions["log_probs"].values.sum(), ctx

    def gradients(*batches: DataProto) -> list[dict[str, Tensor]]:
        engine, collected = build(str(harness.model_folder), options=OPTIONS, micro_batch_size=1), []
        engine.set_loss_fn(loss_fn)
        for batch in batches:
            engine.optimizer_zero_grad()
            with engine.train_mode():
                engine.forward_backward_step(batch)
            named = engine.named_parameters().items()
            collected.append({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named})
        return collected

    rows = harness.batch
    summed, *single = gradients(rows, *(rows.reorder([index]) for index in range(len(rows))))
    for name, total in summed.items():
        expected = sum(row[name].double() for row in single)
        assert isinstance(expected, Tensor)
        largest = max(float(row[name].abs().max()) for row in single)
        torch.testing.assert_close(total.double(), expected, rtol=0, atol=len(rows) * largest * 2**-23)
        assert torch.equal(single[0][name], single[0][name].bfloat16().float()), name
    assert not all(torch.equal(total, total.bfloat16().float()) for total in summed.values())


@pytest.mark.parametrize("mode", [None, "full", "selective"])
def test_layers_compute_in_bfloat16_also_when_recomputed(harness: EngineHarness, mode: str | None) -> None:
    model = {"enable_gradient_checkpointing": True, "gradient_checkpointing_mode": mode} if mode else {}
    engine, dtypes = build(str(harness.model_folder), options=OPTIONS, model=model), []
    parameters = engine.named_parameters()
    engine.module.hf.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, inputs: dtypes.extend((inputs[0].dtype, module.up_proj.weight.dtype))
    )
    result = train(engine, harness, steps=1)
    assert dtypes == [torch.bfloat16] * (4 if mode else 2)
    assert all(p is parameters[name] and p.dtype == torch.float32 for name, p in engine.named_parameters().items())
    plain = train(build(str(harness.model_folder), options=OPTIONS), harness, steps=1)
    assert result["losses"] == plain["losses"]
    assert distance(result["weights"], plain["weights"]) < 1e-5


def test_weights_are_restored_after_an_error(harness: EngineHarness) -> None:
    engine = build(str(harness.model_folder), options=OPTIONS)
    parameters = engine.named_parameters()

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError

    engine.set_loss_fn(fails)
    with engine.train_mode(), pytest.raises(ZeroDivisionError):
        engine.forward_backward_step(harness.batch)
    assert all(p is parameters[name] for name, p in engine.named_parameters().items())


def test_compute_dtype_of_the_weights_changes_nothing(harness: EngineHarness) -> None:
    folder = str(harness.model_folder)
    same = train(build(folder, options={"mixed_precision": {"param_dtype": "float32"}}), harness)
    default = train(build(folder), harness)
    assert same["losses"] == default["losses"]
    assert all(torch.equal(weight, same["weights"][name]) for name, weight in default["weights"].items())


def test_reduction_in_bfloat16_is_rejected() -> None:
    config = EngineConfig(model=EngineModel(path="m"), options={"mixed_precision": {"reduce_dtype": "bfloat16"}})
    with pytest.raises(EngineError, match=r"no ranks to reduce.*Set mixed_precision\.reduce_dtype=float32"):
        SingleDeviceEngine(config)


def _fsdp(folder: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return train(build(folder, "fsdp", options=OPTIONS, **fields), EngineHarness(SingleDeviceEngine, path))


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)], ids=["weights", "adapter"])
def test_steps_equal_those_of_fsdp(harness: EngineHarness, lora: LoRAConfig | None, tmp_path: Path) -> None:
    """One rank of FSDP casts the same weights; float32 sums may have another order."""
    fields = {"model": {"lora": lora}, "micro_batch_size": 3}
    folder = str(harness.model_folder)
    expected = run_warm_ranks(_fsdp, 1, folder, str(tmp_path), fields)[0]
    actual = train(build(folder, options=OPTIONS, **fields), harness)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert distance(actual["weights"], expected["weights"]) < 1e-4


def test_flash_kernel_gets_bfloat16_on_an_accelerator(harness: EngineHarness) -> None:
    folder = str(harness.model_folder)
    expected = train(build(folder, options=OPTIONS), harness, steps=1)
    with emulated_cuda() as device:
        engine = build(folder, options=OPTIONS, device=DEVICE)
        actual = train(engine, harness, steps=1)
        assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
        launches = [device.launches[f"_flash_attention_{name}"] for name in ("forward", "backward")]
        assert launches == [2, 2]  # layers
    assert actual["losses"] == pytest.approx(expected["losses"], rel=3 * 2**-8, abs=3 * 2**-8)
    assert isinstance(harness.batch["input_ids"], Ragged)
