"""`Ragged`: every method, its errors, and round trips on random rows."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.errors import BatchError
from camshaft.ragged import Ragged, row_index

R = Ragged.from_rows([[1, 2, 3], [], [4, 5]])


def lists(ragged):
    return [row.tolist() for row in ragged.rows()]


ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=6)


def make(rows):
    return Ragged.from_rows(rows, dtype=torch.int64)


# -- construction ---------------------------------------------------------------------------------------


def test_from_rows_keeps_rows_and_lengths():
    assert R.values.tolist() == [1, 2, 3, 4, 5]
    assert R.lengths.tolist() == [3, 0, 2]
    assert lists(R) == [[1, 2, 3], [], [4, 5]]


def test_dtype_comes_from_the_first_row_with_a_token():
    assert Ragged.from_rows([[], [1.5], [2]]).values.dtype == torch.float32
    assert Ragged.from_rows([torch.tensor([True])]).values.dtype == torch.bool
    assert Ragged.from_rows([[], []]).values.dtype == torch.int64
    assert Ragged.from_rows([[1]], dtype=torch.float64).values.dtype == torch.float64


def test_no_rows_at_all():
    empty = Ragged.from_rows([])
    assert len(empty) == 0
    assert empty.rows() == []
    assert empty.padded().shape == (0, 0)
    assert empty.sum().shape == (0,)
    assert empty.map(torch.Tensor.bool).sum().dtype == torch.int64
    assert empty.map(torch.Tensor.bfloat16).sum().dtype == torch.float32
    assert len(empty.select([])) == 0
    assert len(Ragged.join(empty, empty)) == 0


@pytest.mark.parametrize(
    ("values", "lengths", "says"),
    [
        (torch.zeros(3), torch.tensor([1, 1]), "sum to 2, but values has 3"),
        (torch.zeros(1), torch.tensor([2, -1]), "negative"),
        (torch.zeros(1), torch.tensor([[1]]), "lengths exactly one"),
        (torch.zeros(()), torch.tensor([1]), "at least one dimension"),
    ],
)
def test_values_and_lengths_that_do_not_fit_are_an_error(values, lengths, says):
    with pytest.raises(BatchError, match=says):
        Ragged(values, lengths)


def test_from_padded_keeps_masked_in_tokens():
    grid = torch.tensor([[0, 1, 2], [3, 0, 4]])
    mask = torch.tensor([[0, 1, 1], [1, 0, 1]])
    assert lists(Ragged.from_padded(grid, mask)) == [[1, 2], [3, 4]]
    with pytest.raises(BatchError, match="mask has shape"):
        Ragged.from_padded(grid, mask[:1])


def test_concat_puts_rows_below_rows():
    assert lists(Ragged.concat([R, Ragged.from_rows([[6]])])) == [[1, 2, 3], [], [4, 5], [6]]
    with pytest.raises(BatchError, match="list of parts is empty"):
        Ragged.concat([])


def test_join_concatenates_row_by_row():
    right = Ragged.from_rows([[7], [8, 9], []])
    assert lists(Ragged.join(R, right)) == [[1, 2, 3, 7], [8, 9], [4, 5]]
    with pytest.raises(BatchError, match="left has 3 rows and right has 1"):
        Ragged.join(R, Ragged.from_rows([[1]]))


def test_join_promotes_to_a_common_dtype():
    zeros = Ragged.from_rows([[0, 0]])
    joined = Ragged.join(zeros, Ragged.from_rows([[-0.5]]))
    assert joined.values.tolist() == [0, 0, -0.5]


def test_like_and_map_keep_the_lengths():
    assert lists(R.like(torch.arange(5))) == [[0, 1, 2], [], [3, 4]]
    assert lists(R.map(lambda v: v * 10)) == [[10, 20, 30], [], [40, 50]]
    with pytest.raises(BatchError, match="sum to 5"):
        R.map(lambda v: v[1:])


# -- access ---------------------------------------------------------------------------------------------


def test_offsets_row_ids_and_positions():
    assert R.offsets.tolist() == [0, 3, 3, 5]
    assert R.row_ids().tolist() == [0, 0, 0, 2, 2]
    assert R.positions().tolist() == [0, 1, 2, 0, 1]


def test_rows_share_storage():
    assert R.rows()[2].untyped_storage().data_ptr() == R.values.untyped_storage().data_ptr()


def test_repr_has_rows_and_tokens():
    assert repr(R) == "Ragged(3 rows, 5 tokens, torch.int64, cpu)"


# -- rearranging ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ([2, 0, 2], [[4, 5], [1, 2, 3], [4, 5]]),
        (torch.tensor([1]), [[]]),
        ([-1, -3], [[4, 5], [1, 2, 3]]),
        (range(2), [[1, 2, 3], []]),
        ([], []),
        (slice(1, None), [[], [4, 5]]),
        (slice(None, None, -2), [[4, 5], [1, 2, 3]]),
        (slice(2, 1), []),
        (slice(-1, 99), [[4, 5]]),
    ],
)
def test_select(index, expected):
    assert lists(R.select(index)) == expected


def test_select_of_consecutive_rows_copies_nothing():
    part = R.select(slice(2, 3))
    assert part.values.data_ptr() == R.values[3:].data_ptr()


@pytest.mark.parametrize("index", [[3], [-4], torch.tensor([0, 7])])
def test_a_row_out_of_range_is_an_error(index):
    with pytest.raises(BatchError, match="is out of range"):
        R.select(index)


@pytest.mark.parametrize("mask", [[True, False, True], torch.tensor([True, False, True]), [0.0, 1.0]])
def test_a_mask_is_not_taken_for_row_numbers(mask):
    with pytest.raises(BatchError, match="nonzero"):
        R.select(mask)


def test_row_index_never_gives_negative_numbers():
    index = row_index([-1, 0], 3)
    assert isinstance(index, torch.Tensor)
    assert index.tolist() == [2, 0]
    assert row_index(slice(5, 2), 9) == slice(5, 5)


def test_prefix_and_suffix():
    lengths = torch.tensor([2, 0, 1])
    assert lists(R.prefix(lengths)) == [[1, 2], [], [4]]
    assert lists(R.suffix(lengths)) == [[2, 3], [], [5]]


@pytest.mark.parametrize("method", [Ragged.prefix, Ragged.suffix])
def test_too_many_tokens_is_an_error_that_names_the_row(method):
    with pytest.raises(BatchError, match="row 2 has 2 tokens, but 3 were requested"):
        method(R, torch.tensor([3, 0, 3]))
    with pytest.raises(BatchError, match="row 0 has 3 tokens, but -1 were requested"):
        method(R, torch.tensor([-1, 0, 0]))
    with pytest.raises(BatchError, match="got 2 lengths for 3 rows"):
        method(R, torch.tensor([1, 1]))


def test_padded_on_either_side():
    assert R.padded().tolist() == [[1, 2, 3], [0, 0, 0], [4, 5, 0]]
    assert R.padded("left", value=-1).tolist() == [[1, 2, 3], [-1, -1, -1], [-1, 4, 5]]
    assert R.mask("left").tolist() == [[True, True, True], [False] * 3, [False, True, True]]


def test_trailing_shape_travels_along():
    wide = R.like(torch.arange(10).reshape(5, 2))
    assert wide.padded().shape == (3, 3, 2)
    assert wide.select([2]).values.tolist() == [[6, 7], [8, 9]]
    assert wide.sum().tolist() == [[6, 9], [0, 0], [14, 16]]
    assert lists(Ragged.join(wide, wide))[2] == [[6, 7], [8, 9], [6, 7], [8, 9]]


def test_lengths_stay_on_the_cpu():
    moved = R.to("meta")
    assert moved.values.device.type == "meta"
    assert moved.lengths.device.type == "cpu"


# -- sums -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16])
def test_sum_of_each_row(dtype):
    ragged = R.map(lambda v: v.to(dtype))
    assert ragged.sum().tolist() == [6, 0, 9]


def test_sum_of_a_mask_counts():
    mask = R.like(torch.tensor([True, False, True, True, True]))
    assert mask.sum().tolist() == [2, 0, 2]
    assert mask.sum().dtype == torch.int64


def test_sum_of_half_precision_is_not_rounded_to_it():
    # bfloat16 has 8 bits: adding ones one by one would stop at 256
    ones = Ragged(torch.ones(1001, dtype=torch.bfloat16), torch.tensor([1001]))
    assert ones.sum().tolist() == [1001]


# -- round trips ------------------------------------------------------------------------------------------


@given(ROWS, st.sampled_from(["left", "right"]), st.integers(-99, 99))
def test_padding_and_back(rows, side, value):
    ragged = make(rows)
    grid, mask = ragged.padded(side, value=value), ragged.mask(side)
    assert lists(Ragged.from_padded(grid, mask)) == rows
    assert (grid[~mask] == value).all()


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4)), max_size=5)
)
def test_join_and_split(pairs):
    left, right = make([a for a, _ in pairs]), make([b for _, b in pairs])
    joined = Ragged.join(left, right)
    assert lists(joined) == [a + b for a, b in pairs]
    assert lists(joined.prefix(left.lengths)) == lists(left)
    assert lists(joined.suffix(right.lengths)) == lists(right)


@given(ROWS.filter(bool), st.data())
def test_select_is_list_indexing(rows, data):
    index = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8))
    assert lists(make(rows).select(index)) == [rows[i] for i in index]
    part = data.draw(st.slices(len(rows)))
    assert lists(make(rows).select(part)) == rows[part]


@given(ROWS)
def test_sums_match_those_of_lists(rows):
    assert make(rows).sum().tolist() == [sum(row) for row in rows]
    assert make(rows).map(torch.Tensor.double).sum().tolist() == [sum(row) for row in rows]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.float16])
def test_pickle_keeps_values_dtype_and_lengths(dtype):
    ragged = R.map(lambda v: v.to(dtype))
    back = pickle.loads(pickle.dumps(ragged))
    assert back.values.dtype == dtype
    assert torch.equal(back.values, ragged.values)
    assert torch.equal(back.lengths, ragged.lengths)


def test_pickling_a_slice_copies_only_its_rows():
    big = Ragged(torch.arange(100_000), torch.full((1000,), 100))
    assert len(pickle.dumps(big.select(slice(3, 5)))) < 4000
