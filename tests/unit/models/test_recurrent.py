"""Layers with a recurrent state start every packed row with an empty state."""

from typing import Any

import pytest
import torch
from support.tiny import LINEAR, predicted_tokens, tiny_folder, tiny_rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from camshaft.config.engine import EngineModel
from camshaft.errors import EngineError
from camshaft.models import recurrent
from camshaft.models.attention import PACKED, packed_kwargs
from camshaft.models.loader import load_model
from camshaft.models.packing import Packing
from camshaft.models.recurrent import PADDING, RecurrentLayer, pack_recurrent_layers, row_batches

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmo_hybrid": LINEAR,
    "minimax": {"layer_types": LINEAR["layer_types"], "num_local_experts": 4, "block_size": 8},
}
LENGTHS = [7, 1, 12, 3, 70]


def hf_model(family: str, dtype: str = "float32") -> Any:
    folder = tiny_folder(family, hidden=32, initializer_range=0.1, **SIZES[family])
    options = {"attn_implementation": PACKED, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def packed_layer(hf: nn.Module) -> RecurrentLayer:
    return next(module for module in hf.modules() if isinstance(module, RecurrentLayer))


# -- batches of rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], LENGTHS, list(range(1, 60))])
def test_batches_hold_every_token_once_and_little_padding(lengths: list[int]) -> None:
    batches, places = row_batches(tuple(lengths), torch.device("cpu"))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(lengths)))
    tokens = torch.cat([batch.tokens.flatten() for batch in batches])
    assert torch.equal(tokens[places], torch.arange(sum(lengths)))
    for batch in batches:
        count = sum(lengths[row] for row in batch.rows)
        assert batch.tokens.numel() <= (1 + PADDING) * count
        assert (batch.tokens.numel() if batch.mask is None else int(batch.mask.sum())) == count


def test_rows_of_equal_length_form_one_batch_without_padding() -> None:
    batches, _ = row_batches((4, 4, 4), torch.device("cpu"))
    assert len(batches) == 1
    assert batches[0].mask is None


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SIZES)
def test_names_and_calls_of_transformers_do_not_change(family: str) -> None:
    hf, tokens = hf_model(family), tiny_rows([9])[0][None]
    names, expected = [name for name, _ in hf.named_parameters()], hf(tokens).logits
    cls = [type(module).__name__ for module in hf.modules()]
    pack_recurrent_layers(hf)
    pack_recurrent_layers(hf)
    assert packed_layer(hf)
    assert [name for name, _ in hf.named_parameters()] == names
    assert [type(module).__name__ for module in hf.modules()] == cls
    assert torch.equal(hf(tokens).logits, expected)
    prompt, greedy = tokens[:, :4], {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(hf.generate(prompt, **greedy), hf_model(family).generate(prompt, **greedy))


@pytest.mark.parametrize("family", SIZES)
def test_rows_do_not_depend_on_other_rows(family: str) -> None:
    hf, rows = hf_model(family, "float64"), tiny_rows(LENGTHS)
    pack_recurrent_layers(hf)

    def logits(rows: list[Tensor]) -> Tensor:
        kwargs = packed_kwargs(Packing([len(row) for row in rows]), "cpu")
        return hf(input_ids=torch.cat(rows)[None], **kwargs).logits[0].split([len(row) for row in rows])[2]

    changed = [row if index == 2 else row.flip(0) for index, row in enumerate(rows)]
    torch.testing.assert_close(logits(changed), logits(rows), rtol=0, atol=0)


def test_checkpointing_gives_equal_gradients() -> None:
    folder = str(tiny_folder("qwen3_5_text", hidden=32, **LINEAR))

    def gradients(checkpointing: bool) -> list[Tensor]:
        model = load_model(
            EngineModel(path=folder, enable_gradient_checkpointing=checkpointing), "float32", "cpu", seed=0
        ).train()
        out = model(torch.cat(tiny_rows(LENGTHS)), Packing(LENGTHS), predicted_tokens(LENGTHS), ("log_probs",))
        return list(torch.autograd.grad(out["log_probs"].mean(), list(model.parameters())))

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_shared_prefixes_are_rejected() -> None:
    hf = hf_model("qwen3_5_text")
    pack_recurrent_layers(hf)
    assert not load_model(
        EngineModel(path=str(tiny_folder("qwen3_5_text", hidden=32, **LINEAR))), "float32", "cpu", seed=0
    ).supports_prefix_sharing
    hidden = torch.zeros(1, 5, 32)
    with pytest.raises(EngineError, match="Qwen3_5GatedDeltaNet does not support prefix sharing"):
        packed_layer(hf)(hidden, **packed_kwargs(Packing([3, 2], [None, 0]), "cpu"))


# -- kernels ---------------------------------------------------------------------------------------


def test_kernels_receive_the_boundaries_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for packed rows, replaced here by loops over the rows, give the results of batches of rows."""
    hf = hf_model("qwen3_next", "float64")
    pack_recurrent_layers(hf)
    layer, packing = packed_layer(hf), Packing(LENGTHS)
    hidden = torch.randn(1, packing.size, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kwargs = packed_kwargs(packing, "cpu")
    expected = layer(hidden, **kwargs)
    convolve, attend = modeling_qwen3_next.causal_conv1d_fn, modeling_qwen3_next.torch_chunk_gated_delta_rule
    calls = []

    def convolve_rows(x: Tensor, weight: Tensor, bias: Any, activation: str, seq_idx: Tensor, **_: Any) -> Tensor:
        calls.append("convolution")
        assert x.stride(1) == 1  # the layout that seq_idx requires
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([convolve(part, weight, bias, activation) for part in x.split(lengths, -1)], -1)

    def attend_rows(*tensors: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any) -> Any:
        calls.append("attention")
        options = {name: options[name] for name in ("use_qk_l2norm_in_kernel",)}
        parts = zip(*(t.split(cu_seqlens.diff().tolist(), 1) for t in (*tensors, g, beta)), strict=True)
        return torch.cat([attend(*q_k_v, g=g, beta=b, **options)[0] for *q_k_v, g, b in parts], 1), None

    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", convolve_rows)
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", attend_rows)
    monkeypatch.setattr(recurrent, "has_kernels", lambda: True)
    monkeypatch.setattr(recurrent, "is_cuda", lambda tensor: True)
    torch.testing.assert_close(layer(hidden, **kwargs), expected, rtol=0, atol=1e-6)
    assert calls == ["convolution", "attention"]
