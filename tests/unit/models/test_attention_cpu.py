import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from camshaft.models.cpu import attention as attention_cpu
from camshaft.models.cpu.attention import calls_of, cpu_can, cpu_documents

FLOAT = torch.float32
Parents = list[int | None]
CASES: list[tuple[list[int], Parents | None]] = [
    ([6], None),
    ([5, 3, 3], None),
    ([5, 3, 3, 7, 2, 4], [None, 0, 0, None, 3, 3]),
    ([4, 1, 6], [None, 0, None]),
    ([3, 2, 4, 1, 1], [None, None, 1, 1, 1]),
]


def dense(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], parents: Parents | None) -> Tensor:
    """Softmax over all tokens at once, with a mask that says who sees whom."""
    ends = list(itertools.accumulate(lengths, initial=0))
    sees = torch.zeros(ends[-1], ends[-1], dtype=torch.bool)
    for document, length in enumerate(lengths):
        own = slice(ends[document], ends[document + 1])
        sees[own, own] = torch.ones(length, length).tril().bool()
        parent = None if parents is None else parents[document]
        if parent is not None:
            sees[own, ends[parent] : ends[parent + 1]] = True
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    return (scores.masked_fill(~sees, float("-inf")).softmax(-1) @ value).transpose(0, 1)


def inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8))
    return [torch.randn(s, generator=random, dtype=dtype).transpose(0, 1).requires_grad_() for s in shapes]


def compare(lengths: list[int], parents: Parents | None, dtype: torch.dtype, within: float) -> None:
    """With a dense softmax, output and gradients."""
    given = inputs(sum(lengths), dtype)
    found, wanted = cpu_documents(*given, lengths, parents), dense(*given, lengths, parents)
    torch.testing.assert_close(found, wanted, rtol=0, atol=within)
    back = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, given, back), torch.autograd.grad(wanted, given, back), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=within)


@pytest.mark.parametrize(("lengths", "parents"), CASES)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_output_and_gradients_are_those_of_a_dense_softmax(
    lengths: list[int], parents: Parents | None, dtype: torch.dtype, within: float
) -> None:
    compare(lengths, parents, dtype, within)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), max_size=4)), min_size=1, max_size=4))
def test_any_families_of_documents(families: list[tuple[int, list[int]]]) -> None:
    lengths: list[int] = []
    parents: Parents = []
    for parent, children in families:
        place = len(lengths)
        lengths += [parent, *children]
        parents += [None, *[place] * len(children)]
    given = inputs(sum(lengths), torch.float64)
    found, wanted = cpu_documents(*given, lengths, parents), dense(*given, lengths, parents)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def told(lengths: list[int], width: int) -> list[tuple[int, int, bool]]:
    """Of each call: documents in its batch, tokens, and whether a mask keeps documents apart."""
    own, _ = calls_of(tuple(lengths), None, width, FLOAT)
    assert sum(call.size for call in own) == sum(lengths)
    return [(count, size, mask is not None) for count, size, mask in own]


def test_long_neighbours_of_one_length_are_one_call_and_children_of_one_parent_are_one() -> None:
    lengths, parents = (400, 200, 200, 300, 400, 500), (None, 0, 0, 0, None, 4)
    own, families = calls_of(lengths, parents, 512, FLOAT)
    assert [(count, size) for count, size, _ in own] == [(1, 400), (2, 400), (1, 300), (1, 400), (1, 500)]
    assert all(mask is None for _, _, mask in own)
    assert [(children.start, children.stop, parent.start, parent.stop) for children, parent in families] == [
        (400, 1100, 0, 400),
        (1500, 2000, 1100, 1500),
    ]


def test_short_neighbours_share_a_call_as_long_as_that_computes_less_in_vain_than_a_call_costs() -> None:
    """Two documents of 30 and 20 tokens compute 2 x 30 x 20 scores in vain, 4 x 300 operations for each: 1.44 million;
    with heads of 320 numbers together 1.54 million, and a call costs 1.5 million."""
    assert told([30, 20], width=300) == [(1, 50, True)]
    assert told([30, 20], width=320) == [(1, 30, False), (1, 20, False)]
    assert told([2, 1, 3], width=128) == [(1, 6, True)]


def test_a_batch_of_documents_of_one_length_stays_one_where_a_mask_would_compute_more() -> None:
    """Eight of 30 tokens compute nothing in vain side by side; with a mask 56 x 900 scores."""
    assert told([30] * 8 + [1], width=128) == [(8, 240, False), (1, 1, False)]
    assert told([1] + [30] * 8, width=128) == [(1, 1, False), (8, 240, False)]
    assert told([5, 5, 0, 5], width=128) == [(3, 15, False)]


def test_a_mask_lets_each_token_see_its_own_document_up_to_itself() -> None:
    (call,), _ = calls_of((2, 1, 3), None, 128, FLOAT)
    assert call.mask is not None
    assert call.mask.shape == (1, 1, 6, 6)
    assert call.mask.dtype == FLOAT
    sees = [[0], [0, 1], [2], [3], [3, 4], [3, 4, 5]]
    wanted = [[0.0 if other in row else -torch.inf for other in range(6)] for row in sees]
    assert call.mask[0, 0].tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_with_documents_that_share_a_call(dtype: torch.dtype) -> None:
    lengths, parents = [5, 3, 2, 7, 4], [None, 0, 0, None, 3]
    given = inputs(sum(lengths), torch.float64)
    found = cpu_documents(*(tensor.to(dtype) for tensor in given), lengths, parents)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), dense(*given, lengths, parents), rtol=0, atol=3e-2)


@pytest.mark.parametrize("call", [0, 10**9])
def test_whether_documents_share_calls_or_not_the_numbers_are_those(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cpu, "CALL", call)
    calls_of.cache_clear()
    lengths, parents = [5, 3, 3, 1, 7, 2, 4], [None, 0, 0, 0, None, 4, 4]
    compare(lengths, parents, torch.float64, within=1e-13)
    calls_of.cache_clear()


def test_masks_that_a_generation_has_made_serve_a_training_step() -> None:
    calls_of.cache_clear()
    lengths = [5, 3, 1]
    with torch.inference_mode():
        cpu_documents(*inputs(9, torch.float64), lengths)
    compare(lengths, None, torch.float64, within=1e-13)
    assert calls_of.cache_info().hits


def test_the_scale_is_the_callers() -> None:
    query, key, value = inputs(5, torch.float64)
    found = cpu_documents(query, key, value, [5], scale=0.5)
    torch.testing.assert_close(found, dense(query * 0.5 * 8**0.5, key, value, [5], None), rtol=0, atol=1e-13)


def test_what_the_kernel_does_not_take_is_left_to_others() -> None:
    query = torch.randn(1, 2, 3, 4)
    assert cpu_can(query, query, 0.0)
    assert not cpu_can(query, query, 0.1)
    assert not cpu_can(query, torch.randn(1, 2, 3, 5), 0.0)
    assert not cpu_can(query.to("meta"), query, 0.0)
