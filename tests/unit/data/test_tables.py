import pytest

from camshaft.data.tables import read_columns, read_rows, write_parquet
from camshaft.errors import BatchError


@pytest.fixture
def files(tmp_path):
    a = write_parquet(tmp_path / "a.parquet", [{"prompt": "x", "n": i, "only_a": 0} for i in range(3)])
    b = write_parquet(tmp_path / "b.parquet", [{"prompt": "y", "n": i} for i in range(2)])
    return [a, b]


def test_rows_of_all_files_come_in_order(files):
    table = read_rows(files, ["prompt", "n"])
    assert [(row["prompt"], row["n"]) for row in table.rows] == [("x", 0), ("x", 1), ("x", 2), ("y", 0), ("y", 1)]


def test_one_path_needs_no_list(files):
    assert len(read_rows(str(files[0]), ["n"])) == 3


def test_a_location_names_the_file_and_the_row(files):
    table = read_rows(files, ["n"])
    assert table.location(2) == f"{files[0]}, row 2"
    assert table.location(3) == f"{files[1]}, row 0"


def test_optional_columns_are_read_from_files_that_have_them(files):
    assert read_rows(files, ["n"], ["prompt", "only_a", "nowhere"]).rows[2:4] == [
        {"n": 2, "prompt": "x", "only_a": 0},
        {"n": 0, "prompt": "y"},
    ]
    assert read_columns(files) == {"n", "prompt"}


@pytest.mark.parametrize(("max_samples", "rows"), [(None, 5), (-1, 5), (1, 1), (4, 4), (99, 5)])
def test_max_samples_takes_the_first_rows(files, max_samples, rows):
    table = read_rows(files, ["prompt", "n"], max_samples=max_samples)
    assert table.rows == read_rows(files, ["prompt", "n"]).rows[:rows]
    assert sum(table.counts) == rows


def test_nested_values_are_read_as_python_objects(tmp_path):
    row = {"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "1"}}
    assert read_rows(write_parquet(tmp_path / "n.parquet", [row]), list(row)).rows == [row]


def test_a_missing_file_is_named_with_the_nearest_one(files, tmp_path):
    with pytest.raises(BatchError, match=r"the data file .*aa\.parquet does not exist.*Did you mean .*a\.parquet"):
        read_rows(tmp_path / "aa.parquet", ["n"])


def test_a_folder_is_not_a_file(files, tmp_path):
    with pytest.raises(BatchError, match=r"is a folder.*a\.parquet, b\.parquet"):
        read_rows(tmp_path, ["n"])


def test_files_of_different_formats_are_one_table(files, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "z", "n": 7}\n')
    table = read_rows([files[0], tmp_path / "x.jsonl"], ["prompt", "n"])
    assert table.rows[-1] == {"prompt": "z", "n": 7}
    assert table.location(3).endswith("x.jsonl, line 1")


def test_an_empty_file_is_named(tmp_path, files):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"n": pyarrow.array([], pyarrow.int64())}), tmp_path / "e.parquet")
    with pytest.raises(BatchError, match=r"e\.parquet has no rows"):
        read_rows([files[0], tmp_path / "e.parquet"], ["n"])


def test_a_missing_column_is_reported_with_the_nearest(files):
    with pytest.raises(
        BatchError, match=r"a\.parquet has no column 'promt'. Did you mean 'prompt'\? .*prompt, n, only_a"
    ):
        read_rows(files, ["promt"])


def test_no_paths_at_all_is_an_error():
    with pytest.raises(BatchError, match="the list of data files is empty"):
        read_rows([], ["n"])


def test_max_samples_zero_is_an_error(files):
    with pytest.raises(BatchError, match="max_samples=0"):
        read_rows(files, ["n"], max_samples=0)


def test_a_column_name_with_invalid_text_is_an_error(tmp_path):
    path = write_parquet(tmp_path / "damaged.parquet", [{"prompt": "1+1="}])
    path.write_bytes(path.read_bytes().replace(b"prompt", b"\x80rompt"))
    with pytest.raises(BatchError, match=r"damaged\.parquet cannot be read"):
        read_rows(path, ["prompt"])
