"""Value and reward heads of families for which transformers has no class.

The oracle is the decoder that `AutoModel` builds, on each row separately, and a linear layer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.ranks import run_warm_ranks
from support.tiny import predicted_tokens, tiny_batch, tiny_folder, tiny_rows
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from camshaft.checkpoint.export import Probe, export_hugging_face
from camshaft.config.engine import EngineConfig, EngineModel, LoRAConfig
from camshaft.engine.fsdp import FSDPEngine
from camshaft.engine.single import SingleDeviceEngine
from camshaft.models.classes import model_class, scalar_class
from camshaft.models.loader import load_model
from camshaft.models.lora import adapter_weights, save_adapter
from camshaft.models.packed import Head, PackedModel
from camshaft.models.packing import Packing

LENGTHS = [7, 1, 12, 3]
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {},
    "glm4_moe": {"num_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
CASES: list[tuple[str, Head]] = [("gemma3_text", "value"), ("granite", "reward"), ("glm4_moe", "value")]
"""Families and heads without a class in transformers."""
LORA = LoRAConfig(rank=4, alpha=8)


def folder_of(family: str) -> Path:
    return tiny_folder(family, hidden=32, initializer_range=0.1, **FAMILIES[family])


def load(family: str, head: Head, dtype: str = "float32", **settings: Any) -> PackedModel:
    settings = {"path": str(folder_of(family)), "new_head": head == "reward", **settings}
    return load_model(EngineModel(head=head, **settings), dtype, "cpu", seed=0)


def outputs_of(model: PackedModel) -> Tensor:
    name = "values" if model.head == "value" else "scores"
    return model(torch.cat(tiny_rows(LENGTHS)), Packing(LENGTHS), predicted_tokens(LENGTHS), (name,))[name]


def by_decoder(decoder: Any, head: Head, weight: Tensor, bias: Tensor | None) -> Tensor:
    hidden = [decoder(input_ids=row[None]).last_hidden_state[0] for row in tiny_rows(LENGTHS)]
    chosen = [row[:-1] if head == "value" else row[-1:] for row in hidden]
    return F.linear(torch.cat(chosen), weight, bias)[:, 0]


def gradients_of(outputs: Tensor, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    loss = (outputs * torch.arange(1, len(outputs) + 1)).mean()
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


@pytest.mark.parametrize(("family", "head"), CASES)
def test_outputs_and_gradients_equal_decoder_and_linear_layer(family: str, head: Head) -> None:
    model = load(family, head, "float64")
    decoder = AutoModel.from_pretrained(
        folder_of(family), dtype="float64", attn_implementation="eager", experts_implementation="eager"
    )
    layer = {n: w.detach().clone().requires_grad_() for n, w in model.hf.named_parameters() if n.startswith("score.")}
    assert layer.keys() == ({"score.weight", "score.bias"} if head == "value" else {"score.weight"})
    outputs, expected = outputs_of(model), by_decoder(decoder, head, *layer.values(), *[None] * (2 - len(layer)))
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-6)
    assert outputs.std() > 0.1
    named = {f"model.{name}": weight for name, weight in decoder.named_parameters()} | layer
    grads = gradients_of(outputs, dict(model.hf.named_parameters()))
    for name, gradient in gradients_of(expected, named).items():
        torch.testing.assert_close(grads.pop(name), gradient, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert not grads


@pytest.mark.parametrize(("family", "head"), [("qwen2", "value"), ("gpt2", "value"), ("qwen2", "reward")])
def test_built_classes_equal_those_of_transformers(family: str, head: Head) -> None:
    config = AutoConfig.from_pretrained(tiny_folder(family), num_labels=1)
    causal = AutoModelForCausalLM._model_mapping[type(config)]
    own = model_class(config, head)
    assert own.__name__.startswith("AutoModel")
    built, expected = scalar_class(causal, head)(config), own.from_config(config)
    assert type(built).__name__ == type(expected).__name__
    shapes = {name.replace("classifier", "score"): w.shape for name, w in expected.named_parameters()}
    assert {name: w.shape for name, w in built.named_parameters()} == shapes


@pytest.mark.parametrize(("family", "head"), CASES)
def test_an_exported_model_is_loaded_bit_for_bit(family: str, head: Head, tmp_path: Path) -> None:
    model = EngineModel(path=str(folder_of(family)), head=head, random_init=True)
    engine = SingleDeviceEngine(EngineConfig(model=model, seed=3))
    engine.init_model()
    with engine.eval_mode():
        export_hugging_face(engine.named_weights(), model, tmp_path / "out", check=Probe(engine.infer_batch))
    loaded = dict(load(family, head, path=str(tmp_path / "out"), new_head=False).weights())
    weights = dict(engine.module.weights())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(files["score.weight"], weights["score.weight"])
    assert set(load_file(folder_of(family) / "model.safetensors")) - set(files) <= {"lm_head.weight"}


def test_an_adapter_and_its_head_load_in_peft(tmp_path: Path) -> None:
    model = load("gemma3_text", "value", lora=LORA)
    trained = {name: weight for name, weight in model.hf.named_parameters() if weight.requires_grad}
    assert all("lora_" in name or name.startswith("score.") for name in trained)
    with torch.no_grad():
        for weight in trained.values():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    save_adapter(adapter_weights(model.hf), tmp_path, LORA, str(folder_of("gemma3_text")))
    config = AutoConfig.from_pretrained(folder_of("gemma3_text"), num_labels=1)
    bare = model_class(config, "value").from_pretrained(folder_of("gemma3_text"), config=config).eval()
    reference: Any = peft.PeftModel.from_pretrained(bare, str(tmp_path))
    expected = [reference(input_ids=row[None]).logits[0, :-1, 0] for row in tiny_rows(LENGTHS)]
    torch.testing.assert_close(outputs_of(model), torch.cat(expected), rtol=0, atol=1e-5)
    again = load("gemma3_text", "value", lora=LORA.model_copy(update={"adapter_path": str(tmp_path)}))
    assert torch.equal(outputs_of(again), outputs_of(model))


def values_on_ranks(path: str) -> list[float]:
    engine = FSDPEngine(EngineConfig(model=EngineModel(path=path, head="value"), seed=0))
    engine.init_model()
    with engine.eval_mode():
        return engine.infer_batch(tiny_batch())["values"].values.tolist()


def test_two_sharded_ranks_compute_the_values_of_one() -> None:
    path = str(folder_of("gemma3_text"))
    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path=path, head="value"), seed=0))
    engine.init_model()
    with engine.eval_mode():
        expected = engine.infer_batch(tiny_batch())["values"].values
    for values in run_warm_ranks(values_on_ranks, 2, path):
        torch.testing.assert_close(torch.tensor(values), expected, rtol=0, atol=1e-6)
