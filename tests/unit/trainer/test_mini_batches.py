import pytest
import torch

from camshaft.dataproto import DataProto
from camshaft.trainer.mini_batches import balance_ranks, shard_rows


def rows(count: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(count)})


def sharded(batch: DataProto, mini_batch: int, epochs: int, seed: int | None, dp_size: int) -> DataProto:
    return batch.reorder(shard_rows(len(batch), mini_batch, epochs, seed, dp_size))


def test_each_rank_receives_its_part_of_each_mini_batch() -> None:
    # Mini-batches 0..3 and 4..7; the first half of each belongs to rank 0, whose part of a call is the first half.
    assert sharded(rows(8), mini_batch=4, epochs=1, seed=None, dp_size=2)["row"].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert sharded(rows(4), mini_batch=2, epochs=2, seed=None, dp_size=2)["row"].tolist() == [0, 2, 0, 2, 1, 3, 1, 3]


@pytest.mark.parametrize("seed", [None, 3])
def test_one_rank_gets_the_mini_batches_of_the_iterator(seed: int | None) -> None:
    expected = [mini["row"].tolist() for mini in rows(12).make_iterator(4, epochs=3, seed=seed)]
    shards = sharded(rows(12), mini_batch=4, epochs=3, seed=seed, dp_size=1)
    assert [part["row"].tolist() for part in shards.split(4)] == expected


@pytest.mark.parametrize("dp_size", [2, 3, 6])
def test_mini_batches_do_not_depend_on_the_number_of_ranks(dp_size: int) -> None:
    alone = sharded(rows(24), mini_batch=6, epochs=2, seed=5, dp_size=1).split(6)
    ranks = [part.split(6 // dp_size) for part in sharded(rows(24), 6, 2, 5, dp_size).chunk(dp_size)]
    together = [sorted(row for part in parts for row in part["row"].tolist()) for parts in zip(*ranks, strict=True)]
    assert together == [sorted(mini["row"].tolist()) for mini in alone]
    assert len(together) == 8
    assert together[:4] != together[4:]


def test_shares_have_equal_rows_and_nearly_equal_tokens() -> None:
    # 9 and 1 against 8 and 2; the original order gives 17 against 3.
    lengths = torch.tensor([9, 8, 1, 2])
    assert balance_ranks(rows(4), lengths, dp_size=2)["row"].tolist() == [0, 2, 1, 3]
    assert balance_ranks(rows(4), lengths, dp_size=1)["row"].tolist() == [0, 1, 2, 3]
    # A rank whose share of tokens one row exceeds still gets its number of rows.
    assert balance_ranks(rows(4), torch.tensor([1, 1, 1, 90]), dp_size=2)["row"].tolist() == [2, 3, 0, 1]
