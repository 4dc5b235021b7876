"""Statistics of data files, compared with hand-counted numbers or numpy."""

from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from camshaft.data import count_repeated, count_shared, summarize_files, summarize_lengths
from camshaft.dataproto import Ragged


def test_file_facts_contain_types_and_missing_values(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"prompt": ["a", None, "c"], "reward_model": [{"ground_truth": "1"}, None, None], "n": [1, 2, 3]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    (facts,) = summarize_files([tmp_path / "a.parquet"], ["prompt", "reward_model", "not there"])
    assert (facts.path, facts.num_rows) == (tmp_path / "a.parquet", 3)
    assert [(column.name, column.type, column.missing) for column in facts.columns] == [
        ("prompt", "string", 1),
        ("reward_model", "struct<ground_truth: string>", 2),
        ("n", "int64", None),
    ]


@pytest.mark.parametrize("count", [1, 2, 10, 99, 100, 101, 1000])
def test_percentiles_match_numpy_and_bars_cover_all_rows(count: int) -> None:
    lengths = np.random.default_rng(count).integers(1, 700, count)
    facts = summarize_lengths(torch.from_numpy(lengths))
    expected = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").tolist()
    assert [facts.percentiles[p] for p in (50, 90, 99)] == expected
    assert facts.max_length == lengths.max()
    assert len(facts.bars) <= 12
    for first, last, number in facts.bars:
        assert number == ((lengths >= first) & (lengths <= last)).sum()
    assert sum(number for _, _, number in facts.bars) == count


def test_duplicates_are_compared_token_for_token() -> None:
    train = Ragged.from_rows([[1, 2], [3], [1, 2], [], [1, 2]])
    val = Ragged.from_rows([[1], [2], [3], [1, 2], [1, 2, 3], [3]])
    assert count_repeated(train) == 2
    assert count_shared(val, train) == 3
    assert count_shared(train, val) == 4
