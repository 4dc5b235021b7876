from collections import Counter

import pytest

from camshaft.data.loader import StatefulLoader
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import BatchError


def rows(count):
    prompts = Ragged.from_rows([[i] * (i % 3 + 1) for i in range(count)])
    return DataProto.from_dict({"prompts": prompts, "uid": [str(i) for i in range(count)]})


def firsts(batches):
    """Return the row numbers of each batch."""
    return [[int(row[0]) for row in batch["prompts"].rows()] for batch in batches]


def test_each_epoch_has_each_row_once_in_a_new_order():
    loader = StatefulLoader(rows(12), 4, total_epochs=3, seed=1)
    batches = firsts(loader)
    epochs = [[row for batch in batches[i : i + 3] for row in batch] for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_depends_only_on_the_seed():
    def order(seed):
        return firsts(StatefulLoader(rows(12), 4, total_epochs=2, seed=seed))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_without_shuffle_rows_come_in_order():
    assert firsts(StatefulLoader(rows(5), 2, shuffle=False, drop_last=False)) == [[0, 1], [2, 3], [4]]


def test_uids_are_unique_over_all_epochs_and_name_the_row():
    uids = [uid for batch in StatefulLoader(rows(6), 3, total_epochs=4) for uid in batch["uid"]]
    assert set(Counter(uids).values()) == {1}
    assert sorted(uids)[:2] == ["0/0", "0/1"]


@pytest.mark.parametrize(("drop_last", "batches", "total"), [(True, 2, 6), (False, 3, 9)])
def test_len_counts_the_batches_of_all_epochs(drop_last, batches, total):
    loader = StatefulLoader(rows(5), 2, total_epochs=3, drop_last=drop_last)
    assert (loader.steps_per_epoch, len(loader)) == (batches, total)
    assert len(list(loader)) == total


def test_dropped_rows_differ_between_epochs():
    batches = firsts(StatefulLoader(rows(5), 4, total_epochs=8))
    assert len({tuple(sorted(set(range(5)) - set(batch))) for batch in batches}) > 1


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("stop", range(10))
def test_resumed_loader_returns_the_remaining_batches(stop, drop_last):
    def make():
        return StatefulLoader(rows(7), 2, total_epochs=3, seed=3, drop_last=drop_last)

    all_rows = firsts(make())
    stopped, before = make(), []
    for batch in stopped:
        if len(before) == stop:
            break
        before.append(batch)
        state = stopped.state_dict()
    resumed = make()
    if before:
        resumed.load_state_dict(state)
    assert firsts(before) + firsts(resumed) == all_rows


def test_returned_rows_start_the_next_batch():
    loader = StatefulLoader(rows(9), 4, shuffle=False)
    first = loader.next_batch()
    loader.return_rows(3)
    assert loader.state_dict()["position"] == 1
    assert firsts([first, *loader]) == [[0, 1, 2, 3], [1, 2, 3, 4], [5, 6, 7, 8]]


def test_rows_of_a_finished_epoch_can_be_returned_during_iteration():
    loader, consumed = StatefulLoader(rows(4), 2, total_epochs=2, seed=1), []
    for batch in loader:
        consumed += firsts([batch])
        if len(consumed) == 2:
            loader.return_rows(2)
    all_rows = firsts(StatefulLoader(rows(4), 2, total_epochs=2, seed=1))
    assert consumed == [*all_rows[:2], all_rows[1], *all_rows[2:]]


def test_returned_rows_that_fill_no_batch_are_dropped():
    loader = StatefulLoader(rows(4), 2, shuffle=False, total_epochs=2)
    loader.next_batch()
    loader.next_batch()
    loader.return_rows(1)
    assert (loader.epoch, loader.position) == (1, 0)


def test_next_batch_works_after_the_last_epoch():
    loader = StatefulLoader(rows(2), 2, shuffle=False)
    assert firsts(loader) == [[0, 1]]
    assert loader.exhausted
    assert firsts([loader.next_batch()]) == [[0, 1]]


def test_length_counts_steps_by_rows_per_step():
    assert len(StatefulLoader(rows(20), 8, total_epochs=2, rows_per_step=3)) == 2 * 6


def test_state_after_the_last_batch_is_exhausted():
    loader = StatefulLoader(rows(4), 2, total_epochs=2)
    list(loader)
    again = StatefulLoader(rows(4), 2, total_epochs=2)
    again.load_state_dict(loader.state_dict())
    assert list(again) == []


def test_state_can_be_loaded_during_iteration():
    loader = StatefulLoader(rows(6), 2, total_epochs=2)
    stream = iter(loader)
    next(stream)
    state = loader.state_dict()
    expected = firsts(next(stream) for _ in range(4))
    loader.load_state_dict(state)
    assert firsts(stream) == [*expected, *firsts(StatefulLoader(rows(6), 2, total_epochs=2))[5:]]


def test_resuming_with_another_batch_size_continues_at_the_same_row():
    loader = StatefulLoader(rows(12), 4, shuffle=False)
    next(iter(loader))
    other = StatefulLoader(rows(12), 2, shuffle=False)
    other.load_state_dict(loader.state_dict())
    assert firsts(other)[0] == [4, 5]


def test_resuming_with_a_larger_batch_size_starts_the_next_epoch():
    loader = StatefulLoader(rows(5), 2, total_epochs=2, shuffle=False)
    next(iter(loader))
    other = StatefulLoader(rows(5), 4, total_epochs=2, shuffle=False)
    other.load_state_dict(loader.state_dict())
    assert [batch["uid"].tolist()[0] for batch in other] == ["1/0"]


def test_resuming_with_other_data_or_seed_is_an_error():
    state = StatefulLoader(rows(6), 2, seed=1).state_dict()
    with pytest.raises(BatchError, match=r"num_rows=6, but this run has num_rows=7"):
        StatefulLoader(rows(7), 2, seed=1).load_state_dict(state)
    with pytest.raises(BatchError, match=r"tokens=[0-9a-f]{16}, but this run has tokens=[0-9a-f]{16}: the tokens"):
        StatefulLoader(rows(7).reorder(slice(1, 7)), 2, seed=1).load_state_dict(state)
    with pytest.raises(BatchError, match=r"seed=1, but this run has seed=2.*trainer\.resume_mode=disable or another"):
        StatefulLoader(rows(6), 2, seed=2).load_state_dict(state)


@pytest.mark.parametrize("change", ["a token", "the order of two rows", "a longer row"])
def test_resuming_with_changed_rows_is_an_error(change):
    prompts = {
        "a token": [[0], [1], [9]],
        "the order of two rows": [[1], [0], [2]],
        "a longer row": [[0], [1], [2, 2]],
    }

    def loader(data):
        return StatefulLoader(DataProto.from_dict({"prompts": Ragged.from_rows(data), "uid": ["0", "1", "2"]}), 1)

    state = loader([[0], [1], [2]]).state_dict()
    loader([[0], [1], [2]]).load_state_dict(state)
    with pytest.raises(
        BatchError, match=r"tokens=\w+, but this run has tokens=\w+: the tokens or the order of the rows in the files"
    ):
        loader(prompts[change]).load_state_dict(state)


def test_state_without_a_token_checksum_can_be_loaded():
    state = StatefulLoader(rows(6), 2, seed=1).state_dict()
    del state["tokens"]
    StatefulLoader(rows(6), 2, seed=1).load_state_dict(state)


def test_fewer_rows_than_a_batch_is_an_error():
    with pytest.raises(BatchError, match=r"the data has 3 rows, but one batch needs 8\. .* add at least 5 rows"):
        StatefulLoader(rows(3), 8)


def test_fewer_rows_than_a_batch_are_fine_without_drop_last():
    assert [len(batch) for batch in StatefulLoader(rows(3), 8, drop_last=False)] == [3]


@pytest.mark.parametrize(("count", "size"), [(0, 1), (3, 0)])
def test_no_rows_or_an_empty_batch_is_an_error(count, size):
    with pytest.raises(BatchError):
        StatefulLoader(rows(count), size)
