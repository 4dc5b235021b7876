"""Attention with soft-caps and sinks in blocks of queries, compared with one dense softmax in float64."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.dense_attention import dense_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from camshaft.models import blockwise
from camshaft.models.blockwise import Scores, blockwise_attention
from camshaft.models.cpu import packed_cpu_attention
from camshaft.models.packing import Packing

Parents = list[int | None]
CASES: list[tuple[list[int], Parents | None]] = [
    ([6], None),
    ([5, 3, 3, 1], None),
    ([5, 3, 3, 7, 2, 4], [None, 0, 0, None, 3, 3]),
    ([2, 9, 6, 6, 1], [None, None, 1, 1, 1]),
    ([3, 2, 4, 1, 1], [None, None, 1, 1, 1]),
]


def inputs(tokens: int, value_dim: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query, key and value of 4 and 2 heads, and sinks."""
    random = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, value_dim))
    tensors = [2 * torch.randn(s, generator=random, dtype=dtype).transpose(0, 1) for s in shapes]
    return [tensor.requires_grad_() for tensor in (*tensors, torch.randn(4, generator=random, dtype=dtype))]


def compare(lengths: list[int], parents: Parents | None, scores: Scores, with_sinks: bool, value_dim: int = 8) -> None:
    """Compare output and gradients with a dense softmax."""
    query, key, value, sinks = inputs(sum(lengths), value_dim)
    leaves = [query, key, value, *([sinks] if with_sinks else [])]
    used = sinks if with_sinks else None
    actual = blockwise_attention(query, key, value, Packing(lengths, parents), scores, used)
    expected = dense_attention(query, key, value, lengths, parents, **scores._asdict(), sinks=used)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    back = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(0))
    gradients, references = (torch.autograd.grad(out, leaves, back) for out in (actual, expected))
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("lengths", "parents"), CASES)
@pytest.mark.parametrize("size", [1, 4, blockwise.CPU_BLOCK])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_output_and_gradients_match_a_dense_softmax(
    lengths: list[int], parents: Parents | None, size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "CPU_BLOCK", size)
    for softcap, with_sinks in itertools.product((None, 1.5), (False, True)):
        compare(lengths, parents, Scores(0.4, window, softcap), with_sinks)


def test_values_of_another_width() -> None:
    compare([5, 3, 7], None, Scores(0.4, softcap=2.0), with_sinks=True, value_dim=3)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), max_size=4)), min_size=1, max_size=4),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 12)),
)
def test_any_families_of_documents(families: list[tuple[int, list[int]]], size: int, window: int | None) -> None:
    lengths: list[int] = []
    parents: Parents = []
    for parent, children in families:
        place = len(lengths)
        lengths += [parent, *children]
        parents += [None, *[place] * len(children)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "CPU_BLOCK", size)
        compare(lengths, parents, Scores(0.4, window, 3.0), with_sinks=True)


@pytest.mark.parametrize(("lengths", "parents"), CASES)
def test_sinks_of_the_cpu_kernel_match_a_dense_softmax(lengths: list[int], parents: Parents | None) -> None:
    query, key, value, sinks = leaves = inputs(sum(lengths))
    actual = packed_cpu_attention(query, key, value, Packing(lengths, parents), 0.4, sinks)
    expected = dense_attention(query, key, value, lengths, parents, 0.4, sinks=sinks)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    back = torch.randn_like(expected)
    gradients, references = (torch.autograd.grad(out, leaves, back) for out in (actual, expected))
    torch.testing.assert_close(gradients, references, rtol=0, atol=1e-12)


def test_one_token_by_hand() -> None:
    # The score ln 3 and the sink 0 give probabilities 3/4 and 1/4.
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    score, sink = torch.full_like(one, 3.0).log(), torch.zeros(1, dtype=torch.float64)
    out = blockwise_attention(score, one, 8 * one, Packing([1]), Scores(1.0), sink)
    assert torch.allclose(out, 6 * one)
    # A cap of 1 turns the score atanh(1/2) into 1/2.
    capped = blockwise_attention((0.5 * one).atanh(), one, one, Packing([1]), Scores(1.0, softcap=1.0), sink)
    assert torch.allclose(capped, (0.5 * one).sigmoid())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float64(dtype: torch.dtype) -> None:
    lengths, parents = CASES[2]
    exact = [tensor.detach().to(dtype).double().requires_grad_() for tensor in inputs(sum(lengths))]
    query, key, value, sinks = leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    scores = Scores(0.4, 4, 2.0)
    actual = blockwise_attention(query, key, value, Packing(lengths, parents), scores, sinks)
    query, key, value, sinks = exact
    expected = dense_attention(query, key, value, lengths, parents, **scores._asdict(), sinks=sinks)
    back = torch.randn_like(expected)
    gradients = torch.autograd.grad(actual, leaves, back.to(dtype))
    references = torch.autograd.grad(expected, exact, back.to(dtype).double())
    within = 4 * torch.finfo(dtype).eps  # the rounding of the output, which the backward pass reads, and of the result
    for got, want in zip((actual, *gradients), (expected.detach(), *references), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=0, atol=within * float(want.abs().max()))


class LargestTensor(TorchDispatchMode):
    """Remember the largest number of elements of a result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, result.numel() if isinstance(result, Tensor) else 0)
        return result


def test_memory_does_not_grow_with_the_square_of_a_row() -> None:
    tokens = 2048
    query, key, value, sinks = inputs(tokens, dtype=torch.float32)
    with LargestTensor() as largest:
        out = blockwise_attention(query, key, value, Packing([tokens]), Scores(0.4, softcap=1.0), sinks)
        out.sum().backward()
    assert largest.elements == 4 * blockwise.CPU_BLOCK * tokens
