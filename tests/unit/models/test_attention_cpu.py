import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.dense_attention import dense_attention
from torch import Tensor

from camshaft.models import cpu
from camshaft.models.cpu import packed_cpu_attention, supports_cpu_kernel
from camshaft.models.packing import Packing

Parents = list[int | None]
CASES: list[tuple[list[int], Parents | None]] = [
    ([6], None),
    ([5, 3, 3], None),
    ([5, 3, 3, 7, 2, 4], [None, 0, 0, None, 3, 3]),
    ([4, 1, 6], [None, 0, None]),
    ([3, 2, 4, 1, 1], [None, None, 1, 1, 1]),
]


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8))
    query, key, value = (torch.randn(s, generator=random, dtype=dtype).transpose(0, 1).requires_grad_() for s in shapes)
    return query, key, value


def compare(lengths: list[int], parents: Parents | None, dtype: torch.dtype, within: float) -> None:
    """Compare output and gradients with a dense softmax."""
    tensors = inputs(sum(lengths), dtype)
    actual, expected = (
        packed_cpu_attention(*tensors, Packing(lengths, parents)),
        dense_attention(*tensors, lengths, parents),
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=within)
    back = torch.randn_like(actual)
    for gradient, reference in zip(
        torch.autograd.grad(actual, tensors, back), torch.autograd.grad(expected, tensors, back), strict=True
    ):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=within)


@pytest.mark.parametrize(("lengths", "parents"), CASES)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_output_and_gradients_match_a_dense_softmax(
    lengths: list[int], parents: Parents | None, dtype: torch.dtype, within: float
) -> None:
    compare(lengths, parents, dtype, within)


@given(st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), max_size=4)), min_size=1, max_size=4))
def test_any_families_of_documents(families: list[tuple[int, list[int]]]) -> None:
    lengths: list[int] = []
    parents: Parents = []
    for parent, children in families:
        place = len(lengths)
        lengths += [parent, *children]
        parents += [None, *[place] * len(children)]
    tensors = inputs(sum(lengths), torch.float64)
    actual, expected = (
        packed_cpu_attention(*tensors, Packing(lengths, parents)),
        dense_attention(*tensors, lengths, parents),
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_equal_lengths_and_shared_prefixes_use_one_call() -> None:
    packing = Packing((4, 2, 2, 3, 4, 5), (None, 0, 0, 0, None, 4))
    assert packing.runs == [(1, 4), (2, 2), (1, 3), (1, 4), (1, 5)]
    assert packing.prefix_spans == [(slice(4, 11), slice(0, 4)), (slice(15, 20), slice(11, 15))]


@pytest.mark.parametrize("short", [0, cpu.SHORT])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float64(dtype: torch.dtype, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward kernel runs in half precision, or in float32 for short segments."""
    monkeypatch.setattr(cpu, "SHORT", short)
    lengths, parents = [5, 3, 2, 7, 4], [None, 0, 0, None, 3]
    tensors = inputs(sum(lengths), torch.float64)
    query, key, value = halves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    result = packed_cpu_attention(query, key, value, Packing(lengths, parents))
    exact = dense_attention(*tensors, lengths, parents)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=3e-2)
    back = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients = torch.autograd.grad(result, halves, back)
    for gradient, reference in zip(gradients, torch.autograd.grad(exact, tensors, back.double()), strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), reference, rtol=0, atol=6e-2)


def test_the_scale_is_the_callers() -> None:
    query, key, value = inputs(5, torch.float64)
    result = packed_cpu_attention(query, key, value, Packing([5]), scale=0.5)
    torch.testing.assert_close(result, dense_attention(query * 0.5 * 8**0.5, key, value, [5], None), rtol=0, atol=1e-13)


def test_unsupported_calls_use_other_kernels() -> None:
    query = torch.randn(1, 2, 3, 4)
    assert supports_cpu_kernel(query, query, 0.0)
    assert not supports_cpu_kernel(query, query, 0.1)
    assert not supports_cpu_kernel(query, torch.randn(1, 2, 3, 5), 0.0)
    assert not supports_cpu_kernel(query.to("meta"), query, 0.0)
