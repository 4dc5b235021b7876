"""Splitting and merging by seats, without processes. `seat(rank, dp_rank, ...)` layouts are written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from camshaft.controller.worker import Dispatch, gather, register, registered_methods, result_slot, scatter
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError
from camshaft.seat import Seat

DP = Dispatch.DP_COMPUTE_PROTO
ALONE = [Seat()]
FLAT = [Seat(0, 2, 0, 2), Seat(1, 2, 1, 2)]
# Two data-parallel groups of two adjacent ranks; the second group's ranks come first, the odd ranks collect.
CROSSED = [
    Seat(0, 4, 1, 2, collects=False),
    Seat(1, 4, 1, 2),
    Seat(2, 4, 0, 2, collects=False),
    Seat(3, 4, 0, 2),
]


def numbered(rows: int, **meta: object) -> DataProto:
    tokens = Ragged.from_rows([torch.arange(row + 1) for row in range(rows)])
    return DataProto.from_dict(
        {"row": torch.arange(rows), "tokens": tokens, "uid": [f"u{i}" for i in range(rows)]}, meta
    )


def rows_of(call: object) -> list[int]:
    assert isinstance(call, tuple)
    return call[0][0]["row"].tolist()


# -- register ----------------------------------------------------------------------------------------


class Base:
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None: ...

    @register(dispatch_mode=DP)
    def compute(self, batch: DataProto) -> DataProto:
        return batch

    def helper(self) -> None: ...


class Derived(Base):
    def compute(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def init_model(self) -> None: ...


def test_only_decorated_methods_are_registered():
    assert registered_methods(Base) == {"init_model": Dispatch.ONE_TO_ALL, "compute": DP}


def test_an_override_keeps_the_mode_unless_it_sets_one():
    assert registered_methods(Derived) == {"init_model": Dispatch.RANK_ZERO, "compute": DP}


def test_a_decorator_on_top_does_not_hide_the_mode():
    class Role:
        @torch.no_grad()
        @register(dispatch_mode=DP)
        def compute(self, batch: DataProto) -> DataProto:
            return batch

    assert registered_methods(Role) == {"compute": DP}


def test_a_registered_function_is_still_itself():
    batch = numbered(1)
    assert Base().compute(batch) is batch


# -- simple modes ------------------------------------------------------------------------------------


def test_one_to_all_sends_the_same_and_returns_rank_zero():
    calls = scatter(Dispatch.ONE_TO_ALL, CROSSED, ("x",), {"k": 1})
    assert calls == [(("x",), {"k": 1})] * 4
    assert gather(Dispatch.ONE_TO_ALL, CROSSED, ["a", "b", "c", "d"]) == "a"
    assert [result_slot(Dispatch.ONE_TO_ALL, seat) for seat in CROSSED] == [0, None, None, None]


def test_one_to_all_does_not_split_batches_or_lists():
    batch = numbered(4)
    calls = scatter(Dispatch.ONE_TO_ALL, FLAT, (batch, [1, 2]), {})
    assert all(call is not None and call[0][0] is batch and call[0][1] == [1, 2] for call in calls)


def test_rank_zero_does_not_run_on_other_ranks():
    assert scatter(Dispatch.RANK_ZERO, FLAT, (1,), {}) == [((1,), {}), None]
    assert gather(Dispatch.RANK_ZERO, FLAT, [7, None]) == 7


def test_all_to_all_takes_and_returns_one_entry_per_rank():
    calls = scatter(Dispatch.ALL_TO_ALL, FLAT, (["a", "b"],), {"k": [1, 2]})
    assert calls == [(("a",), {"k": 1}), (("b",), {"k": 2})]
    assert gather(Dispatch.ALL_TO_ALL, FLAT, [3, None]) == [3, None]
    weights = object()
    first, second = scatter(Dispatch.ALL_TO_ALL, FLAT, ([weights, weights],), {})
    assert first is second  # packed once
    assert [result_slot(Dispatch.ALL_TO_ALL, seat) for seat in CROSSED] == [0, 1, 2, 3]


def test_all_to_all_needs_one_entry_per_rank():
    with pytest.raises(
        BatchError, match="argument 0 must be a list with one entry for each of 2 ranks; got a list of 3"
    ):
        scatter(Dispatch.ALL_TO_ALL, FLAT, ([1, 2, 3],), {})
    with pytest.raises(BatchError, match=r"argument 'k' .* ranks; got str"):
        scatter(Dispatch.ALL_TO_ALL, FLAT, (), {"k": "ab"})


# -- DP_COMPUTE_PROTO --------------------------------------------------------------------------------


def test_a_rank_reads_the_part_of_its_dp_rank():
    assert [rows_of(call) for call in scatter(DP, FLAT, (numbered(6),), {})] == [[0, 1, 2], [3, 4, 5]]


def test_model_parallel_neighbours_read_the_same_rows():
    calls = scatter(DP, CROSSED, (numbered(4),), {})
    assert [rows_of(call) for call in calls] == [[2, 3], [2, 3], [0, 1], [0, 1]]
    assert calls[0] is calls[1]  # one object, so that it is sent as one message


def test_only_batches_are_split_over_ranks():
    first, second = scatter(DP, FLAT, (numbered(2), [1, 2]), {"other": numbered(4), "beta": None})
    assert first is not None
    assert second is not None
    assert (rows_of(first), rows_of(second)) == ([0], [1])
    assert first[0][1] == second[0][1] == [1, 2]
    assert second[1]["other"]["row"].tolist() == [2, 3]
    assert second[1]["beta"] is None


def test_one_rank_receives_and_returns_the_same_objects():
    batch = numbered(3)
    (call,) = scatter(DP, ALONE, (batch,), {})
    assert call is not None
    assert call[0][0] is batch
    assert gather(DP, ALONE, [batch]) is batch


def test_indivisible_rows_show_the_arithmetic():
    with pytest.raises(
        BatchError, match=r"argument 0 has 5 rows.*2 data-parallel ranks \(5 = 2 x 2 \+ 1\)"
    ) as exc_info:
        scatter(DP, FLAT, (numbered(5),), {})
    assert "pad_to_divisor(2)` adds 1 rows" in str(exc_info.value)
    padded, added = numbered(5).pad_to_divisor(2)
    assert (len(scatter(DP, FLAT, (padded,), {})), added) == (2, 1)


def test_a_call_without_a_batch_is_an_error():
    with pytest.raises(BatchError, match="has no DataProto argument; pass at least one DataProto"):
        scatter(DP, FLAT, (1,), {"k": [numbered(2)]})


def test_an_empty_batch_is_accepted():
    calls = scatter(DP, FLAT, (numbered(0),), {})
    results = [call[0][0] for call in calls if call is not None]
    assert len(gather(DP, FLAT, results)) == 0


def test_results_are_merged_in_the_order_of_dp_rank():
    low, high = numbered(4, of="low").reorder([0, 1]), numbered(4, of="high").reorder([2, 3])
    merged = gather(DP, CROSSED, [None, high, "not looked at", low])
    assert merged["row"].tolist() == [0, 1, 2, 3]
    assert merged["tokens"].lengths.tolist() == [1, 2, 3, 4]
    assert list(merged["uid"]) == ["u0", "u1", "u2", "u3"]
    assert merged.meta_info == {"of": "low", "ranks": [{"of": "low"}, {"of": "high"}]}
    assert [result_slot(DP, seat) for seat in CROSSED] == [None, 1, None, 0]


def test_none_on_all_ranks_stays_none():
    assert gather(DP, FLAT, [None, None]) is None


@pytest.mark.parametrize(
    ("results", "message"), [([0.5, 0.5], "float on rank 0"), ([numbered(1), None], "NoneType on rank 1")]
)
def test_other_results_are_an_error_with_the_fix(results: list[object], message: str):
    with pytest.raises(BatchError, match=f"{message}; return a DataProto .*, or None"):
        gather(DP, FLAT, results)


def test_a_metric_from_a_single_rank_is_an_error():
    with pytest.raises(BatchError, match="float on rank 0"):
        gather(DP, ALONE, [0.5])


@pytest.mark.parametrize(
    ("seats", "message"),
    [
        ([Seat(0, 2, 0, 1), Seat(1, 2, 0, 1)], r"dp_rank 0 needs exactly one .* has 2: \[0, 1\]"),
        ([Seat(0, 2, 0, 2), Seat(1, 2, 1, 2, collects=False)], r"dp_rank 1 needs exactly one .* has 0: \[\]"),
        ([Seat(0, 2, 0, 2), Seat(1, 2, 0, 1)], "rank 1 of 2 does not match its group"),
        ([Seat(1, 2, 1, 2), Seat(0, 2, 0, 2)], "rank 0 of 2 does not match its group"),
        ([Seat(), Seat()], "rank 0 of 2 does not match its group"),
    ],
)
def test_seats_must_cover_the_batch_exactly_once(seats: list[Seat], message: str):
    with pytest.raises(BatchError, match=message):
        scatter(DP, seats, (numbered(2),), {})
    with pytest.raises(BatchError, match=message):
        gather(DP, seats, [numbered(1), numbered(1)])


@given(dp_size=st.integers(1, 4), neighbours=st.integers(1, 3), rows_each=st.integers(0, 4), data=st.data())
def test_split_and_merge_give_the_batch_back_in_every_layout(
    dp_size: int, neighbours: int, rows_each: int, data: st.DataObject
):
    world = dp_size * neighbours
    order = data.draw(st.permutations([(dp, n) for dp in range(dp_size) for n in range(neighbours)]))
    seats = [Seat(rank, world, dp, dp_size, collects=n == 0) for rank, (dp, n) in enumerate(order)]
    batch = numbered(dp_size * rows_each)
    results = [call[0][0] for call in scatter(DP, seats, (batch,), {}) if call is not None]
    merged = gather(DP, seats, results)
    assert merged["row"].tolist() == batch["row"].tolist()
    assert torch.equal(merged["tokens"].values, batch["tokens"].values)
