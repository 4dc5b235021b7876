"""`DataProto`: every method, its errors, and round trips on random batches."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError


def batch_of(num_rows=4):
    """Build one column of each kind; row i has i tokens i, the number i / 2 and the object {"id": i}."""
    return DataProto.from_dict(
        {
            "responses": Ragged.from_rows([[i] * i for i in range(num_rows)], dtype=torch.int64),
            "score": torch.arange(num_rows) / 2,
            "extra_info": [{"id": i} for i in range(num_rows)],
        },
        {"step": 7},
    )


def test_sequences_are_built_from_prompts_and_responses():
    prompts, responses = Ragged.from_rows([[1, 2], [3], [4]]), Ragged.from_rows([[5], [6, 7], []])
    advantages = responses.like(torch.tensor([0.5, 1.5, 2.5]))
    experts = responses.like(torch.arange(6).view(3, 2))
    batch = DataProto.from_responses(prompts, responses, advantages=advantages, experts=experts)
    assert [row.tolist() for row in batch["input_ids"].rows()] == [[1, 2, 5], [3, 6, 7], [4]]
    assert [row.tolist() for row in batch["loss_mask"].rows()] == [[False, False, True], [False, True, True], [False]]
    assert [row.tolist() for row in batch["advantages"].rows()] == [[0, 0, 0.5], [0, 1.5, 2.5], [0]]
    assert batch["experts"].values.tolist() == [[0, 0], [0, 0], [0, 1], [0, 0], [2, 3], [4, 5], [0, 0]]
    assert batch["loss_mask"].values.dtype == torch.bool
    tool = responses.like(torch.tensor([True, False, True]))
    masked = DataProto.from_responses(prompts, responses, loss_mask=tool)["loss_mask"]
    assert masked.values.tolist() == [False, False, True, False, False, True, False]
    with pytest.raises(BatchError, match="column 'values' must have one value per response token"):
        DataProto.from_responses(prompts, responses, values=prompts.map(Tensor.float))


def ids(batch):
    """Return the row numbers of `batch_of`, read from each column; the columns must agree."""
    by_object = [info["id"] for info in batch["extra_info"]]
    assert batch["score"].tolist() == [i / 2 for i in by_object]
    assert [row.tolist() for row in batch.ragged("responses").rows()] == [[i] * i for i in by_object]
    return by_object


def same(a, b):
    """Return True if columns, their order and meta_info are equal."""
    assert list(a.columns) == list(b.columns)
    for name, column in a.columns.items():
        other = b.columns[name]
        assert type(column) is type(other), name
        if isinstance(column, Ragged):
            assert torch.equal(column.lengths, other.lengths), name
            column, other = column.values, other.values
        if isinstance(column, torch.Tensor):
            assert column.dtype == other.dtype, name
            assert torch.equal(column, other), name
        else:
            assert column.tolist() == other.tolist(), name
    assert a.meta_info == b.meta_info
    return True


# -- construction and access ----------------------------------------------------------------------------


def test_three_kinds_of_columns():
    batch = batch_of()
    assert len(batch) == 4
    assert isinstance(batch["responses"], Ragged)
    assert isinstance(batch["score"], torch.Tensor)
    assert batch["extra_info"].dtype == object
    assert "score" in batch
    assert "scores" not in batch
    assert repr(batch) == "DataProto(4 rows: responses, score, extra_info)"


def test_lists_of_lists_stay_objects():
    batch = DataProto.from_dict({"raw_prompt_ids": [[1, 2], [3, 4]], "uid": np.array(["a", "b"])})
    assert batch["raw_prompt_ids"].shape == (2,)
    assert batch["raw_prompt_ids"][1] == [3, 4]
    assert batch["uid"].tolist() == ["a", "b"]


@pytest.mark.parametrize("value", ["text", b"bytes", {"a": 1}, 3, None])
def test_an_unsupported_column_is_named(value):
    with pytest.raises(BatchError, match=f"'wrong' must be a tensor, .* got {type(value).__name__}"):
        DataProto.from_dict({"wrong": value})


def test_a_scalar_tensor_is_no_column():
    with pytest.raises(BatchError, match="'wrong' is a scalar"):
        DataProto.from_dict({"wrong": torch.tensor(1.0)})


def test_columns_must_have_the_same_number_of_rows():
    with pytest.raises(BatchError, match=r"'a': 2, 'b': 3"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})


def test_an_empty_batch():
    empty = DataProto()
    assert len(empty) == 0
    assert empty.split(2) == []
    assert [len(part) for part in empty.chunk(3)] == [0, 0, 0]


def test_require_names_the_source_of_a_missing_column():
    batch = batch_of()
    assert batch.require("score", "responses") is batch
    with pytest.raises(BatchError) as error:
        batch.require("score", "values", "whatever")
    assert str(error.value) == (
        "the batch lacks 'values' (written by roles/critic.compute_values), "
        "'whatever' (not in the table of columns); it contains responses, score, extra_info"
    )


def test_reading_a_missing_column_gives_the_same_error():
    with pytest.raises(
        BatchError, match=r"'values' \(written by roles/critic.compute_values\); it contains no columns"
    ):
        DataProto()["values"]


def test_ragged_rejects_another_kind():
    with pytest.raises(BatchError, match="'score' must have one value per token, got Tensor"):
        batch_of().ragged("score")


# -- columns ----------------------------------------------------------------------------------------------


def test_select_drop_rename():
    batch = batch_of()
    assert list(batch.select("score", "responses").columns) == ["score", "responses"]
    assert list(batch.drop("score", "absent").columns) == ["responses", "extra_info"]
    assert list(batch.rename({"score": "reward"}).columns) == ["responses", "reward", "extra_info"]
    assert list(batch.columns) == ["responses", "score", "extra_info"]
    assert batch.select("score").meta_info == batch.drop("score").meta_info == {"step": 7}


def test_select_and_rename_of_a_missing_column_are_errors():
    with pytest.raises(BatchError, match="'advantages'"):
        batch_of().select("advantages")
    with pytest.raises(BatchError, match="'absent'"):
        batch_of().rename({"absent": "x"})
    with pytest.raises(BatchError, match="two columns the same name"):
        batch_of().rename({"score": "responses"})


def test_names_can_be_swapped():
    swapped = batch_of().rename({"score": "responses", "responses": "score"})
    assert isinstance(swapped["score"], Ragged)


def test_with_columns_and_with_meta_keep_the_old_batch():
    batch = batch_of()
    more = batch.with_columns(score=torch.ones(4), uid=["a"] * 4).with_meta(step=8, seed=1)
    assert more["score"].tolist() == [1, 1, 1, 1]
    assert more.meta_info == {"step": 8, "seed": 1}
    assert ids(batch) == [0, 1, 2, 3]
    assert batch.meta_info == {"step": 7}
    with pytest.raises(BatchError, match="different numbers of rows"):
        batch.with_columns(x=torch.zeros(3))


def test_union_takes_the_columns_of_both():
    batch = batch_of()
    other = DataProto.from_dict({"values": torch.zeros(4), "score": batch["score"].clone()}, {"seed": 1})
    union = batch.union(other)
    assert list(union.columns) == ["responses", "score", "extra_info", "values"]
    assert union.meta_info == {"step": 7, "seed": 1}


@pytest.mark.parametrize(
    ("column", "changed"),
    [
        ("responses", Ragged.from_rows([[], [1], [2, 2], [3, 3, 4]])),
        ("responses", Ragged.from_rows([[1], [], [2, 2], [3, 3, 3]])),
        ("responses", Ragged.from_rows([[], [1.0], [2, 2], [3, 3, 3]])),
        ("responses", torch.zeros(4)),
        ("score", torch.tensor([0.0, 0.5, 1.0, 9.0])),
        ("score", torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float64)),
        ("extra_info", [{"id": 0}, {"id": 1}, {"id": 2}, {"id": 9}]),
        ("extra_info", [{"id": 0}, {"id": 1}, {"id": 2}, None]),
    ],
)
def test_union_of_different_values_names_the_column(column, changed):
    with pytest.raises(BatchError, match=f"column '{column}' is in both batches with different values"):
        batch_of().union(DataProto.from_dict({column: changed}))


def test_union_compares_objects_with_arrays():
    def one(last):
        return DataProto.from_dict({"extra_info": [{"x": np.array([1, 2]), "y": [torch.tensor([last])]}]})

    assert len(one(3).union(one(3))) == 1
    with pytest.raises(BatchError, match="extra_info"):
        one(3).union(one(4))


def test_union_of_different_meta_or_rows_is_an_error():
    with pytest.raises(BatchError, match="meta_info 'step'"):
        batch_of().union(DataProto(meta_info={"step": 8}))
    with pytest.raises(BatchError, match="the batches have 4 and 3 rows"):
        batch_of().union(batch_of(3))


def test_union_takes_what_describes_a_call_from_the_later_one():
    first = batch_of().with_meta(metrics={"a": 1.0}, ranks=[{"metrics": {"a": 1.0}}, {}])
    second = DataProto.from_dict({"values": torch.zeros(4)}, {"metrics": {"b": 2.0}, "ranks": [{}, {}]})
    assert first.union(second).meta_info == {"step": 7, "metrics": {"b": 2.0}, "ranks": [{}, {}]}
    assert first.union(DataProto()).meta_info == first.meta_info


def test_union_with_a_batch_without_columns_keeps_the_rows():
    assert len(DataProto().union(batch_of())) == len(batch_of().union(DataProto())) == 4


# -- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ([2, 0, 2], [2, 0, 2]),
        (torch.tensor([-1, 1]), [3, 1]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (slice(0, None, 2), [0, 2]),
        ([], []),
    ],
)
def test_reorder(index, expected):
    assert ids(batch_of().reorder(index)) == expected


def test_reorder_rejects_masks_and_rows_out_of_range():
    with pytest.raises(BatchError, match="nonzero"):
        batch_of().reorder(torch.tensor([True, False, True, False]))
    with pytest.raises(BatchError, match="row 4 is out of range: the batch has 4 rows"):
        batch_of().reorder([4])


def test_consecutive_rows_share_storage():
    batch = batch_of()
    part = batch.split(2)[1]
    assert part["score"].data_ptr() == batch["score"][2:].data_ptr()
    assert part["responses"].values.data_ptr() == batch["responses"].values[1:].data_ptr()


def test_split_leaves_a_short_last_part():
    assert [ids(part) for part in batch_of(5).split(2)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(BatchError, match="size=0"):
        batch_of().split(0)


def test_chunk_returns_equal_parts_or_reports_the_fix():
    assert [ids(part) for part in batch_of().chunk(2)] == [[0, 1], [2, 3]]
    with pytest.raises(BatchError, match=r"4 rows are not divisible by 3; pad_to_divisor\(3\) adds 2 rows"):
        batch_of().chunk(3)
    with pytest.raises(BatchError, match="chunks=0 must be at least 1"):
        batch_of().chunk(0)


def test_concat_rejects_parts_that_differ():
    with pytest.raises(BatchError, match="list of batches is empty"):
        DataProto.concat([])
    with pytest.raises(BatchError, match=r"have the columns \['score'\]"):
        DataProto.concat([batch_of(), batch_of().drop("score")])
    with pytest.raises(BatchError, match=r"'score' has different kinds: \['Ragged', 'Tensor'\]"):
        DataProto.concat([batch_of(), batch_of().with_columns(score=Ragged.from_rows([[1.0]] * 4))])


def test_repeat():
    assert ids(batch_of(2).repeat(3)) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("num_rows", "divisor", "added"), [(4, 2, 0), (5, 4, 3), (2, 7, 5), (1, 1, 0)])
def test_padding_repeats_the_first_rows_and_is_removed(num_rows, divisor, added):
    batch = batch_of(num_rows)
    padded, padding = batch.pad_to_divisor(divisor)
    assert padding == added
    assert ids(padded) == [i % num_rows for i in range(num_rows + added)]
    assert ids(padded.unpad(padding)) == list(range(num_rows))


def test_padding_errors():
    with pytest.raises(BatchError, match="divisor=0"):
        batch_of().pad_to_divisor(0)
    with pytest.raises(BatchError, match="added=5 must be between 0 and the 4 rows"):
        batch_of().unpad(5)
    assert DataProto().pad_to_divisor(3)[1] == 0


# -- mini-batches ---------------------------------------------------------------------------------------------


def test_iterator_without_a_seed_keeps_the_order():
    assert [ids(part) for part in batch_of().make_iterator(2, epochs=2)] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_seeded_iterator_reshuffles_epochs_reproducibly():
    batch = batch_of(32)
    once = [ids(part) for part in batch.make_iterator(8, epochs=2, seed=3)]
    again = [ids(part) for part in batch.make_iterator(8, epochs=2, seed=3)]
    other = [ids(part) for part in batch.make_iterator(8, epochs=2, seed=4)]
    assert once == again != other
    first, second = [i for part in once[:4] for i in part], [i for part in once[4:] for i in part]
    assert sorted(first) == sorted(second) == list(range(32))
    assert first != second
    assert first != list(range(32))


def test_iterator_does_not_use_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(batch_of().make_iterator(2, seed=1))
    assert torch.rand(1) == expected


@pytest.mark.parametrize("size", [0, 3, 8])
def test_mini_batches_must_divide_the_rows(size):
    with pytest.raises(BatchError, match=f"4 rows are not divisible by mini_batch_size={size}"):
        next(batch_of().make_iterator(size))


# -- moving ---------------------------------------------------------------------------------------------------


def test_to_moves_tensors_and_leaves_objects():
    moved = batch_of().to("meta")
    assert moved["score"].device.type == moved["responses"].values.device.type == "meta"
    assert moved["extra_info"].tolist() == batch_of()["extra_info"].tolist()


def test_views_strided_empty_and_gradient_tensors_are_pickled():
    batch = DataProto.from_dict(
        {
            "strided": torch.arange(12.0).reshape(3, 4).T[:, 1:],
            "grad": torch.ones(4, requires_grad=True),
            "none": torch.zeros(4, 0),
            "expanded": torch.zeros(1, dtype=torch.bool).expand(4),
            "no_tokens": Ragged.from_rows([[]] * 4),
            "half": Ragged(torch.arange(4).bfloat16(), torch.ones(4)),
        }
    )
    assert same(pickle.loads(pickle.dumps(batch)), batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_pickle_keeps_every_dtype(dtype):
    batch = DataProto.from_dict(
        {"a": torch.arange(6).reshape(3, 2).to(dtype), "b": Ragged(torch.arange(3).to(dtype), torch.tensor([2, 0, 1]))}
    )
    assert same(pickle.loads(pickle.dumps(batch)), batch)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_a_part_copies_only_its_rows(protocol):
    batch = DataProto.from_dict(
        {
            "tokens": Ragged(torch.zeros(100_000), torch.full((1000,), 100)),
            "score": torch.zeros(1000, 10),
            "uid": list(range(1000)),
        }
    )
    part = batch.split(2)[250]
    assert len(pickle.dumps(part, protocol)) < 6000
    assert same(pickle.loads(pickle.dumps(part, protocol)), part)


def test_pickle_5_sends_tensors_out_of_band():
    batch = DataProto.from_dict(
        {"a": torch.zeros(1000), "b": Ragged(torch.zeros(500), torch.tensor([500] + [0] * 999))}
    )
    buffers = []
    head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 2000
    assert {len(buffer.raw()) for buffer in buffers} == {4000, 2000, 8000}
    assert same(pickle.loads(head, buffers=buffers), batch)


def test_batches_from_read_only_buffers_are_writable():
    buffers = []
    head = pickle.dumps(batch_of(), protocol=5, buffer_callback=buffers.append)
    received = [bytes(buffer.raw()) for buffer in buffers]
    back = pickle.loads(head, buffers=received)
    back["score"].add_(1)
    assert back["score"].tolist() == [1, 1.5, 2, 2.5]
    assert received == [bytes(buffer.raw()) for buffer in buffers]


def test_unpickled_batches_do_not_share_memory():
    batch = batch_of()
    back = pickle.loads(pickle.dumps(batch))
    back["score"].add_(1)
    back["responses"].values.add_(1)
    assert ids(batch) == [0, 1, 2, 3]


# -- round trips ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def batches(draw):
    num_rows = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    rows = draw(st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=num_rows, max_size=num_rows))
    return DataProto.from_dict(
        {
            "tokens": Ragged.from_rows(rows, dtype=dtype),
            "plain": torch.randint(0, 9, (num_rows, *draw(st.lists(st.integers(0, 2), max_size=2)))).to(dtype),
            "objects": draw(st.lists(JSON, min_size=num_rows, max_size=num_rows)),
        },
        draw(st.dictionaries(st.text(max_size=3), JSON, max_size=2)),
    )


@given(batches(), st.integers(1, 7))
def test_splitting_and_concatenating(batch, size):
    assert same(DataProto.concat(batch.split(size)), batch)


@given(batches(), st.integers(1, 4))
def test_repeat_and_take_each_once(batch, times):
    repeated = batch.repeat(times)
    assert len(repeated) == len(batch) * times
    assert same(repeated.reorder(slice(0, None, times)), batch)


@given(batches(), st.randoms(use_true_random=False))
def test_reordering_and_back(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    assert same(batch.reorder(order).reorder(torch.tensor(order).argsort()), batch)


@given(batches(), st.integers(1, 9))
def test_padding_and_back(batch, divisor):
    padded, added = batch.pad_to_divisor(divisor)
    assert len(padded) % divisor == 0
    assert added < divisor
    assert same(padded.unpad(added), batch)


@given(batches())
def test_selecting_and_uniting(batch):
    assert same(batch.select("tokens").union(batch.drop("tokens")), batch)


@given(batches(), st.data())
def test_pickling_any_part(batch, data):
    part = batch.reorder(data.draw(st.slices(len(batch))))
    assert same(pickle.loads(pickle.dumps(part)), part)
