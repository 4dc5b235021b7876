"""An adapter is trained in float32 on frozen weights in bfloat16."""

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.ranks import run_warm_ranks
from support.tiny import tiny_batch, tiny_folder
from torch import Tensor
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from camshaft.config import RolloutEngineConfig
from camshaft.config.engine import EngineCapabilities, EngineConfig, EngineModel, LoRAConfig, OptimConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import BaseEngine, engine_class
from camshaft.engine.context import StepContext
from camshaft.errors import EngineError
from camshaft.models.lora import save_adapter
from camshaft.reshard import rollout_mode
from camshaft.rollout import SamplingParams, build_rollout

LORA = LoRAConfig(rank=4, alpha=8)
CLASSES = {"causal_lm": AutoModelForCausalLM, "value": AutoModelForTokenClassification}
OUTPUTS = {"causal_lm": "log_probs", "value": "values"}
FACTOR = 4
"""Accepted difference from the oracle, as a multiple of the oracle's own rounding error in bfloat16."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a model folder with bfloat16 weights for each head."""
    written = {}
    for head, cls in CLASSES.items():
        torch.manual_seed(5)
        source = str(tiny_folder(hidden=32, initializer_range=0.1))
        model = cls.from_pretrained(source, **({} if head == "causal_lm" else {"num_labels": 1}))
        written[head] = str(tmp_path_factory.mktemp(head))
        model.bfloat16().save_pretrained(written[head])
    return written


def compute_in(dtype: str | None) -> dict[str, Any]:
    return {"mixed_precision": {"param_dtype": dtype}}


def build(folder: str, dtype: str, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Build an engine with an adapter whose matrices are both random, so that it changes the outputs."""
    model = EngineModel(path=folder, head=fields.pop("head", "causal_lm"), lora=LORA)
    strategy, optim = fields.pop("strategy", "reference"), OptimConfig(lr=1e-2, eps=1e-2)
    config = EngineConfig(model=model, dtype=dtype, optim=optim, options=options or {}, seed=3, **fields)  # pyright: ignore
    engine: Any = engine_class(strategy)(config)
    engine.init_model()
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, parameter in engine.named_parameters().items():
            if ".lora_B." in name:
                values = 0.1 * torch.randn(parameter.shape, generator=generator)
                if strategy == "fsdp":
                    values = distribute_tensor(values, parameter.device_mesh)
                parameter.copy_(values)
    engine.set_loss_fn(negative_mean(OUTPUTS[model.head]))
    return engine


def negative_mean(name: str) -> Any:
    def loss_fn(_: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
        return -predictions[name].values.sum() / ctx["num_tokens"], ctx

    return loss_fn


def train(engine: Any, steps: int = 3) -> dict[str, Any]:
    """Run optimizer steps; return losses, gradient norms and the trained weights."""
    with engine.train_mode():
        results = [engine.train_batch(tiny_batch()) for _ in range(steps)]
    weights = {name: weight.clone() for name, weight in engine.named_weights(adapter_only=True)}
    return {"losses": [r.loss for r in results], "norms": [r.grad_norm for r in results], "weights": weights}


def infer(engine: BaseEngine, name: str = "log_probs") -> Tensor:
    with engine.eval_mode():
        return engine.infer_batch(tiny_batch())[name].values


def expect_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (actual["losses"], actual["norms"]) == (expected["losses"], expected["norms"])
    assert actual["weights"].keys() == expected["weights"].keys()
    assert all(torch.equal(weight, expected["weights"][name]) for name, weight in actual["weights"].items())


# -- the same numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["causal_lm", "value"])
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_steps_equal_those_on_float32_weights_bitwise(folders: dict[str, str], head: str, compute: str) -> None:
    """The folder is bfloat16, so both have the same weights; a step casts them to the same dtype."""
    stored = build(folders[head], "bfloat16", None if compute == "bfloat16" else compute_in(compute), head=head)
    expected = build(folders[head], "float32", compute_in(compute), head=head)
    assert torch.equal(infer(stored, OUTPUTS[head]), infer(expected, OUTPUTS[head]))
    expect_same(train(stored), train(expected))


def test_only_frozen_weights_are_bfloat16(folders: dict[str, str]) -> None:
    engine: Any = build(folders["value"], "bfloat16", head="value")
    engine.forward_backward_step(tiny_batch())
    for name, parameter in engine.named_parameters().items():
        trained = ".lora_" in name or name.startswith("score.")
        assert parameter.dtype == (torch.float32 if trained else torch.bfloat16), name
        assert (parameter.grad is not None) is trained
        assert parameter.grad is None or parameter.grad.dtype == torch.float32
    engine.optimizer_step()
    assert {s["exp_avg"].dtype for s in engine.optimizer.state.values()} == {torch.float32}


def peft_model(folder: str, engine: BaseEngine, dtype: torch.dtype) -> Any:
    """Return PEFT's model with the weights of `folder` cast to `dtype`, and the adapter of `engine` in float32."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    settings = peft.LoraConfig(r=LORA.rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(base, settings).eval()
    adapter = {name: weight.clone() for name, weight in engine.named_weights(adapter_only=True)}
    peft.set_peft_model_state_dict(model, adapter)
    return model


def peft_step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return counted log-probs and adapter gradients of `negative_mean`, computed by PEFT one row at a time."""
    rows = []
    for ids in tiny_batch().ragged("input_ids").rows():
        log_p = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        rows.append(log_p[1:])
    log_probs = torch.cat(rows)
    (-log_probs.mean()).backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return log_probs.detach(), {name.replace(".default.", "."): g for name, g in gradients.items()}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def test_outputs_and_gradients_are_those_of_peft_up_to_rounding(folders: dict[str, str]) -> None:
    engine: Any = build(folders["causal_lm"], "bfloat16")
    exact = peft_step(peft_model(folders["causal_lm"], engine, torch.float32))
    rounded = peft_step(peft_model(folders["causal_lm"], engine, torch.bfloat16))
    log_probs = infer(engine)[tiny_batch()["loss_mask"].values]
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(tiny_batch())
    assert relative(log_probs, exact[0]) < FACTOR * relative(rounded[0], exact[0])
    names = {
        f"base_model.model.{name.replace('.default.', '.')}": p.grad for name, p in engine.named_parameters().items()
    }
    gradients = {name: gradient for name, gradient in names.items() if gradient is not None}
    assert gradients.keys() == exact[1].keys()
    error = max(relative(gradient, exact[1][name]) for name, gradient in gradients.items())
    assert 0 < error < FACTOR * max(relative(gradient, exact[1][name]) for name, gradient in rounded[1].items())


# -- merged weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merged_weights_are_those_of_peft_bitwise(folders: dict[str, str], dtype: torch.dtype) -> None:
    """A receiver of float32 weights gets a merge that was never rounded to bfloat16."""
    engine = build(folders["causal_lm"], "bfloat16")
    train(engine, steps=1)
    merged = peft_model(folders["causal_lm"], engine, dtype).merge_and_unload()
    expected = {name: p.detach() for name, p in merged.named_parameters()}
    cast = None if dtype == torch.bfloat16 else lambda _name, _tensor: dtype
    actual = dict(engine.named_weights(dtype_of=cast))
    assert actual.keys() == expected.keys()
    for name, weight in actual.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_built_in_rollout_samples_from_the_merged_weights(folders: dict[str, str], dtype: str) -> None:
    source = str(tiny_folder(hidden=32, initializer_range=0.1))
    engine = build(folders["causal_lm"], "bfloat16")
    train(engine, steps=1)
    oracle = peft_model(folders["causal_lm"], engine, getattr(torch, dtype)).merge_and_unload()
    config = RolloutEngineConfig(model_path=source, dtype=dtype, max_model_len=32)  # pyright: ignore
    rollout, prompts = build_rollout("torch", config), Ragged.from_rows(tiny_batch().ragged("input_ids").rows())
    with rollout_mode(engine, rollout):
        out = rollout.generate_sequences(prompts, SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True))
    for prompt, response, log_probs in zip(prompts.rows(), out.responses.rows(), out.log_probs.rows(), strict=True):
        logits = oracle(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        tolerance = 1e-5 if dtype == "float32" else 0.05
        torch.testing.assert_close(log_probs, expected, rtol=0, atol=tolerance)


# -- checkpoints and layouts --------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["causal_lm", "value"])
def test_a_resumed_run_is_bitwise_the_same(folders: dict[str, str], head: str, tmp_path: Path) -> None:
    straight = train(build(folders[head], "bfloat16", head=head), steps=4)
    first = build(folders[head], "bfloat16", head=head)
    train(first, steps=2)
    first.save_checkpoint(str(tmp_path / "saved"))
    tensors = {name: t for path in tmp_path.rglob("*/model/*.safetensors") for name, t in load_file(path).items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    resumed = build(folders[head], "bfloat16", head=head)
    resumed.load_checkpoint(str(tmp_path / "saved"))
    rest = train(resumed, steps=2)
    assert rest["losses"] == straight["losses"][2:]
    assert all(torch.equal(weight, straight["weights"][name]) for name, weight in rest["weights"].items())


def _on_ranks(folder: str, head: str, saved: str | None) -> dict[str, Any]:
    engine = build(folder, "bfloat16", strategy="fsdp", head=head)
    result = train(engine)
    result["dtypes"] = {name: str(p.dtype) for name, p in engine.named_parameters().items()}
    result["merged"] = {name: weight.clone() for name, weight in engine.named_weights()}
    if saved is not None:
        engine.save_checkpoint(saved)
    return result


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the norm of the difference between two sets of weights."""
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in b))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("head", ["causal_lm", "value"])
def test_steps_of_fsdp_equal_those_of_one_process(
    folders: dict[str, str], head: str, ranks: int, tmp_path: Path
) -> None:
    """Every rank computes the same rows, so all sums are doubled exactly, and the losses divide by doubled counts.

    A processor with instructions for bfloat16 rounds otherwise in other layouts, so both are compared with float32.
    """
    results = run_warm_ranks(_on_ranks, ranks, folders[head], head, str(tmp_path / "saved"))
    engine: Any = build(folders[head], "bfloat16", head=head)
    expected, exact = train(engine), train(build(folders[head], "float32", head=head))
    assert results[0]["dtypes"] == {name: str(p.dtype) for name, p in engine.named_parameters().items()}
    for result in results:
        for name in ("losses", "norms"):
            rounding = max(abs(a - b) for a, b in zip(expected[name], exact[name], strict=True))
            assert result[name] == pytest.approx(exact[name], rel=0, abs=FACTOR * rounding)
        error = distance(expected["weights"], exact["weights"])
        assert distance(result["weights"], exact["weights"]) < FACTOR * error
    loaded = build(folders[head], "bfloat16", head=head)
    loaded.load_checkpoint(str(tmp_path / "saved"))
    weights = dict(loaded.named_weights())
    assert all(torch.equal(weight, results[0]["merged"][name]) for name, weight in weights.items())


def test_an_adapter_folder_of_peft_initializes_the_engine(folders: dict[str, str], tmp_path: Path) -> None:
    engine = build(folders["causal_lm"], "bfloat16")
    save_adapter(engine.named_weights(adapter_only=True), tmp_path, LORA, folders["causal_lm"])
    model = EngineModel(path=folders["causal_lm"], lora=LORA.model_copy(update={"adapter_path": str(tmp_path)}))
    restored = engine_class("reference")(EngineConfig(model=model, dtype="bfloat16"))
    restored.init_model()
    assert torch.equal(infer(restored), infer(engine))


# -- what is rejected ---------------------------------------------------------------------------------


def test_bfloat16_without_an_adapter_is_rejected() -> None:
    config = EngineConfig(model=EngineModel(path="m"), optim=OptimConfig(), dtype="bfloat16")
    with pytest.raises(EngineError, match="does not support training with dtype=bfloat16"):
        engine_class("reference")(config)


@pytest.mark.parametrize("strategy", ["fsdp1"])
def test_another_engine_rejects_the_pair(strategy: str) -> None:
    config = EngineConfig(model=EngineModel(path="m", lora=LORA), optim=OptimConfig(), dtype="bfloat16")
    with pytest.raises(EngineError, match="LoRA on frozen weights with dtype=bfloat16; set dtype=float32"):
        engine_class(strategy)(config)
    with pytest.raises(EngineError, match="LoRA on frozen weights with dtype=bfloat16"):
        EngineCapabilities().validate(config)
