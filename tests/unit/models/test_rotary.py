from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from camshaft.models.cpu.rotary import fuse_rotations
from camshaft.models.tiny import make_tiny_model


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Number by number: each pair of halves is a complex number, and these are not always of length one."""

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        columns = []
        for i in range(half):
            columns.append(x[..., i] * cos[..., i][:, None] - x[..., half + i] * sin[..., i][:, None])
        for i in range(half):
            columns.append(x[..., half + i] * cos[..., half + i][:, None] + x[..., i] * sin[..., half + i][:, None])
        return torch.stack(columns, dim=-1)

    return turned(q), turned(k)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    query, key = (torch.randn(2, 5, heads, 8, generator=random, dtype=dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = (torch.randn(2, 5, 8, generator=random, dtype=dtype) for _ in range(2))
    return [query.requires_grad_(), key.requires_grad_(), cos, sin]


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
def test_output_and_gradients_are_those_of_pairs_of_numbers(dtype: torch.dtype, within: float) -> None:
    fused, given = Attention(), inputs(dtype)
    assert fuse_rotations(fused) == 1
    found, wanted = fused(*given), Attention()(*given)
    assert "_Rotation" in type(found[0].grad_fn).__name__
    back = [torch.randn_like(each) for each in wanted]
    ours, theirs = (torch.autograd.grad(each, given[:2], back) for each in (found, wanted))
    for one, other in zip((*found, *ours), (*wanted, *theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=within)


def test_a_function_that_computes_something_else_is_left_alone() -> None:
    """Cohere's turns neighbours, not halves."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "cohere", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8, intermediate_size=16
        )
    )
    assert fuse_rotations(model) == 0


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral", "gemma3_text"])
def test_models_give_what_they_gave(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family=family)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fused = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert fuse_rotations(fused) == plain.config.num_hidden_layers
    assert fuse_rotations(fused) == 0, "a second time finds nothing to do"
    ids = torch.arange(5, 15)[None]
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain, fused)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for (name, theirs), ours in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_nothing_of_transformers_is_changed(tmp_path: Path) -> None:
    before: Any = (modeling_qwen2.Qwen2Attention.forward, modeling_qwen2.apply_rotary_pos_emb)
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path), dtype=torch.float32)
    assert fuse_rotations(model)
    assert before == (modeling_qwen2.Qwen2Attention.forward, modeling_qwen2.apply_rotary_pos_emb)


def test_other_formats_run_the_layers_own_function(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_tiny_model(tmp_path))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.arange(5, 15)[None]
    before = model(input_ids=ids).logits
    assert fuse_rotations(model) == config.num_hidden_layers
    assert torch.equal(model(input_ids=ids).logits, before)
