"""The attention implementation "packed": documents, windows, cache slots, and unsupported arguments."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import tiny_folder, tiny_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from camshaft.errors import EngineError
from camshaft.models.attention import (
    PACKED,
    no_mask,
    packed_attention,
    packed_kwargs,
    reject_unsupported,
)
from camshaft.models.blockwise import Scores
from camshaft.models.packing import Packing

LAYER: Any = SimpleNamespace(is_causal=True, num_key_value_groups=2)


def oracle(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """Compute causal attention of one document by the formula; (H, L, D) -> (L, H, D)."""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * scaling
    for i in range(query.shape[1]):
        for j in range(query.shape[1]):
            if j > i or (window is not None and i - j >= window):
                scores[:, i, j] = float("-inf")
    return (scores.softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_each_document_attends_only_to_itself(window: int | None):
    lengths = [4, 1, 9, 2]
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(lengths), 8, dtype=torch.float64) for heads in (4, 2, 2))
    kwargs = packed_kwargs(Packing(lengths), "cpu")
    actual, _ = packed_attention(LAYER, query, key, value, scaling=0.3, sliding_window=window, **kwargs)
    parts = zip(*(tensor[0].split(lengths, dim=1) for tensor in (query, key, value)), strict=True)
    expected = torch.cat([oracle(q, k, v, 0.3, window) for q, k, v in parts])
    torch.testing.assert_close(actual[0], expected)


def test_a_window_over_many_blocks_of_queries():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 600, 4) for _ in range(3))
    actual, _ = packed_attention(
        LAYER, query, key, value, scaling=0.5, sliding_window=7, **packed_kwargs(Packing([600]), "cpu")
    )
    distance = torch.arange(600)[:, None] - torch.arange(600)
    mask = (distance >= 0) & (distance < 7)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.5)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


def test_a_row_longer_than_an_ignored_window_is_an_error():
    folder = tiny_folder("phimoe", sliding_window=4, num_local_experts=4)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED)
    model(torch.cat(tiny_rows([4, 3]))[None], **packed_kwargs(Packing([4, 3]), "cpu"))
    with pytest.raises(EngineError, match=r"sliding window of its config \(4 tokens\).*a row of 5 tokens"):
        model(torch.cat(tiny_rows([5, 3]))[None], **packed_kwargs(Packing([5, 3]), "cpu"))


def test_dropout_reaches_the_kernel():
    query = torch.zeros(1, 1, 50, 4)
    out, _ = packed_attention(
        LAYER, query, query, torch.ones_like(query), None, dropout=0.5, cu_seq_lens_q=1, packing=Packing((50,))
    )
    assert not torch.equal(out, torch.ones_like(out))


def test_packed_kwargs_count_each_document_from_zero():
    kwargs = packed_kwargs(Packing([2, 1, 3]), "cpu")
    assert kwargs["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2]]
    assert kwargs["cu_seq_lens_q"].tolist() == [0, 2, 3, 6]
    assert kwargs["cu_seq_lens_q"].dtype == torch.int32
    assert kwargs["max_length_q"] == 3


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_documents_without_tokens_are_an_error(lengths: list[int]):
    with pytest.raises(EngineError, match="at least one token"):
        packed_kwargs(Packing(lengths), "cpu")


class SquareMasks(TorchDispatchMode):
    """Count tensors with tokens x tokens entries."""

    def __init__(self, tokens: int):
        super().__init__()
        self.limit, self.count = tokens * tokens, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += isinstance(result, Tensor) and result.numel() >= self.limit
        return result


def test_a_packed_call_builds_no_quadratic_mask():
    folder = tiny_folder("mistral", hidden=16, sliding_window=8, intermediate=16)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED)
    lengths = [16] * 16
    tokens = torch.cat(tiny_rows(lengths))[None]
    with SquareMasks(256) as squares, torch.no_grad():
        model.model(tokens, **packed_kwargs(Packing(lengths), "cpu"))
    assert squares.count == 0
    with SquareMasks(256) as squares, torch.no_grad():
        model.model(tokens, use_cache=False)
    assert squares.count > 0  # the counter detects such a mask where one exists


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_generate_on_left_padded_prompts_matches_sdpa(family: str):
    folder = tiny_folder(family, initializer_range=0.2, **({"sliding_window": 4} if family == "mistral" else {}))
    rows = tiny_rows([3, 9, 6])
    ids = torch.stack([torch.nn.functional.pad(row, (9 - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(9) >= 9 - len(row) for row in rows]).long()
    generated = []
    for implementation in (PACKED, "sdpa"):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        generated.append((out.sequences, torch.stack(out.logits)))
    assert torch.equal(generated[0][0], generated[1][0])
    assert torch.equal(generated[0][1], generated[1][1])


def test_an_unpadded_call_without_mask_keeps_the_sliding_window():
    folder = tiny_folder("mistral", initializer_range=0.2, sliding_window=4)
    tokens = tiny_rows([12])[0][None]
    outs = [
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)(tokens).logits
        for name in (PACKED, "sdpa")
    ]
    assert torch.equal(*outs)


class ToySlots:
    """A KV cache of every layer, appended in each call; attention by the formula."""

    def __init__(self):
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scores: Scores, sinks: Tensor | None
    ) -> Tensor:
        if module.layer_idx in self.kept:
            old_key, old_value = self.kept[module.layer_idx]
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        self.kept[module.layer_idx] = key, value
        lead = torch.zeros(*query.shape[:2], key.shape[2] - query.shape[2], query.shape[3])
        queries = torch.cat([lead, query], dim=2)
        out = torch.stack([oracle(*row, scores.scale, scores.window) for row in zip(queries, key, value, strict=True)])
        return out[:, -query.shape[2] :]


def test_decode_steps_match_a_full_forward():
    folder = tiny_folder("mistral", initializer_range=0.2, sliding_window=4)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED).eval()
    tokens = torch.stack(tiny_rows([9, 9]))
    slots, parts = ToySlots(), []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, 9)):
            positions = torch.arange(start, stop).expand(2, -1)
            step = model(
                tokens[:, start:stop],
                position_ids=positions,
                attention_mask=no_mask("cpu"),
                slots=slots,
                use_cache=False,
            )
            parts.append(step.logits)
        expected = model(tokens).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=1e-5)


def test_no_mask_without_packing_is_an_error():
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), attn_implementation=PACKED)
    with pytest.raises(EngineError, match="received no_mask"):
        model(tiny_rows([4])[0][None], attention_mask=no_mask("cpu"))


def test_a_packed_batch_of_two_rows_is_an_error():
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), attn_implementation=PACKED)
    with pytest.raises(EngineError, match="got a batch of 2"):
        model(torch.stack(tiny_rows([4, 4])), **packed_kwargs(Packing([4]), "cpu"))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("position_bias", "position bias"),
        ("indices", "sparse"),
    ],
)
def test_unsupported_layer_arguments_are_named(argument: str, message: str):
    query, arguments = torch.zeros(1, 2, 3, 4), dict[str, Any]({argument: 30.0})
    with pytest.raises(EngineError, match=message):
        packed_attention(LAYER, query, query, query, None, **arguments)


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("hy_v4", {}, "sparse attention over selected tokens"),
        ("qwen4_exp_text", {}, "layer_types contains indexed_attention, linear_attention"),
        ("llama4_text", {}, "layer_types contains chunked_attention"),
        ("llama4_text", {"layer_types": ["full_attention"] * 48}, r"scaled queries \(attn_temperature_tuning=True"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "not causal"),
    ],
)
def test_unsupported_attention_configs_are_rejected(family: str, extra: dict[str, Any], message: str):
    with pytest.raises(EngineError, match=message):
        reject_unsupported(AutoConfig.for_model(family, **extra))


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "mistral", "mixtral", "gemma3_text", "gpt_neox", "qwen3_next", "gemma2", "gpt_oss"]
)
def test_supported_configs_are_not_rejected(family: str):
    reject_unsupported(AutoConfig.for_model(family))


@pytest.mark.parametrize("changes", [{"attn_temperature_tuning": False}, {"no_rope_layers": [1] * 48}])
def test_queries_that_are_not_scaled_are_not_rejected(changes: dict[str, Any]):
    reject_unsupported(AutoConfig.for_model("llama4_text", layer_types=["full_attention"] * 48, **changes))
