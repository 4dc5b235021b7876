from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from camshaft.models.cpu import FusedRMSNorm, replace_norms
from camshaft.models.tiny import make_tiny_model


class OnePlusRMSNorm(Qwen2RMSNorm):
    """Gemma's variant, which adds 1 to the weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * (1 + self.weight) / self.weight


class OtherEpsilonRMSNorm(Qwen2RMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states * 2)


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula of the paper."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_output_and_gradients_match_the_formula_in_float64() -> None:
    random = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=random) for shape in ((2, 5, 8), (8,), (2, 5, 8))]
    norm = Qwen2RMSNorm(8, eps=1e-5)
    norm.weight.data.copy_(tensors[1])
    model = nn.Sequential(norm)
    assert replace_norms(model) == 1
    x = tensors[0].clone().requires_grad_()
    output = model(x)
    assert "_RMSNorm" in type(output.grad_fn).__name__
    exact_x, exact_weight, back = (tensor.double().requires_grad_() for tensor in tensors)
    exact = formula(exact_x, exact_weight, 1e-5)
    results = output, *torch.autograd.grad(output, (x, norm.weight), tensors[2])
    expected = exact, *torch.autograd.grad(exact, (exact_x, exact_weight), back)
    for result, reference in zip(results, expected, strict=True):
        # A sum of up to 10 products, each rounded a few times: 32 units in the last place of the largest number.
        near = 32 * torch.finfo(torch.float32).eps * float(reference.detach().abs().max())
        torch.testing.assert_close(result.double(), reference, rtol=0, atol=near)


@pytest.mark.parametrize("kind", [OnePlusRMSNorm, OtherEpsilonRMSNorm])
def test_other_norms_are_not_replaced(kind: type[Qwen2RMSNorm]) -> None:
    model = nn.Sequential(kind(8))
    assert replace_norms(model) == 0
    assert type(model[0]) is kind


def test_parameters_and_state_dict_stay_the_same(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path), dtype=torch.float32).eval()
    before, parameters = model.state_dict(), dict(model.named_parameters())
    replace_norms(model)
    assert list(model.state_dict()) == list(before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not any(module.training for module in model.modules())


def test_a_norm_with_two_parents_stays_one_module() -> None:
    norm = Qwen2RMSNorm(8)
    model = nn.ModuleList([nn.Sequential(norm), nn.Sequential(norm)])
    assert replace_norms(model) == 1
    first, second = (child[0] for child in model.children() if isinstance(child, nn.Sequential))
    assert first is second


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral", "gemma3_text"])
def test_a_model_keeps_the_bits_of_its_loss(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family=family)
    hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fused = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert replace_norms(fused) == {"qwen3": 9, "gemma3_text": 0}.get(family, 5)
    assert replace_norms(fused) == 0, "a second call replaces nothing"
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = torch.arange(5, 15)[None]
    losses = [model(input_ids=ids, labels=ids).loss for model in (hf_model, fused, exact)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    columns: Any = zip(hf_model.parameters(), fused.parameters(), exact.named_parameters(), strict=True)
    for original, replaced, (name, reference) in columns:
        # Rounding order differs: the error against float64 is at most a few times the error of transformers.
        error = float((original.grad - reference.grad).abs().max())
        near = 4 * error + 16 * torch.finfo(torch.float32).eps * float(reference.grad.abs().max())
        torch.testing.assert_close(replaced.grad.double(), reference.grad, rtol=0, atol=near, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_keep_the_bits_of_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_tiny_model(tmp_path))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    ids = torch.arange(5, 15)[None]
    before = model(input_ids=ids).logits
    assert replace_norms(model) == 5
    assert any(isinstance(module, FusedRMSNorm) for module in model.modules())
    assert torch.equal(model(input_ids=ids).logits, before)
