from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from camshaft.models.cpu.rms_norm import _Fused, fuse_norms
from camshaft.models.tiny import make_tiny_model


class RMSNorm(nn.Module):
    """As written in the paper, in float64."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        return (wide / (wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt() * self.weight).to(x.dtype)


class OnePlusRMSNorm(RMSNorm):
    """Gemma's: the weight is what is added to 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.weight) / self.weight


def norm(kind: type[RMSNorm], width: int = 8) -> RMSNorm:
    found = kind(width, 1e-5)
    nn.init.normal_(found.weight, generator=torch.Generator().manual_seed(1))
    return found


def test_output_and_gradients_are_those_of_the_formula_in_float64() -> None:
    fused, plain = norm(RMSNorm), norm(RMSNorm)
    assert fuse_norms(fused) == 1
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
    back = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))
    found, wanted = fused(x), plain(x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad(found, (x, fused.weight), back)
    theirs = torch.autograd.grad(wanted, (x, plain.weight), back)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    other = norm(OnePlusRMSNorm)
    assert fuse_norms(other) == 0
    assert not isinstance(other.forward, _Fused)


@pytest.mark.parametrize(
    ("family", "extra"), [("qwen2", {}), ("llama", {}), ("qwen3", {}), ("mistral", {}), ("gemma3_text", {})]
)
def test_models_give_what_they_gave(family: str, extra: dict[str, int], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family=family, **extra)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fused = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    count = fuse_norms(fused)
    assert fuse_norms(fused) == 0, "a second time finds nothing to do"
    assert count == {"qwen3": 9, "gemma3_text": 0}.get(family, 5)
    ids = torch.arange(5, 15)[None]
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain, fused)]
    assert torch.equal(*losses), "the output has the same bits, and only gradients are rounded in another order"
    for loss in losses:
        loss.backward()
    for (name, theirs), ours in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_other_formats_run_the_modules_own_code(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_tiny_model(tmp_path))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.arange(5, 15)[None]
    before = model(input_ids=ids).logits
    assert fuse_norms(model) == 5
    assert torch.equal(model(input_ids=ids).logits, before)
