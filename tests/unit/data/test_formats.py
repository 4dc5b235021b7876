"""Each supported format is read like the same rows in a parquet file."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from camshaft.data.files import data_files
from camshaft.data.formats import open_data_file
from camshaft.data.tables import read_rows, write_parquet
from camshaft.errors import BatchError

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=\n", "truth": "2", "extra": None},
    {"prompt": 'a "quoted", ü', "truth": "x,y", "extra": "z"},
]


def nested(depth: int) -> bytes:
    """Return a row with `depth` nested lists."""
    return b'{"a": ' + b"[" * depth + b"]" * depth + b"}"


def flipped(content: bytes) -> bytes:
    """Return a gzip file whose compressed data is damaged."""
    return content[:12] + bytes(255 - byte for byte in content[12:])


def write_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write an Arrow stream, the format of `Dataset.save_to_disk`."""
    table = pyarrow.Table.from_pylist(rows)
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def write_arrow_file(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


JSON_LINES = "\n".join(json.dumps(row) for row in ROWS)
CSV = 'prompt,truth,extra\n"1+1=\n",2,\n"a ""quoted"", ü","x,y",z\n'
WRITERS = {
    "rows.parquet": lambda path: write_parquet(path, ROWS),
    "rows.jsonl": lambda path: path.write_text(JSON_LINES),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "lines.json": lambda path: path.write_text(JSON_LINES + "\n\n"),
    "rows.data": lambda path: path.write_text("\ufeff" + JSON_LINES),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(JSON_LINES.encode())),
    "rows.csv": lambda path: path.write_text(CSV),
    "rows.tsv": lambda path: path.write_text('prompt\ttruth\textra\n"1+1=\n"\t2\t\n"a ""quoted"", ü"\tx,y\tz\n'),
    "rows.csv.gz": lambda path: path.write_bytes(gzip.compress(CSV.encode())),
    "stream.arrow": lambda path: write_stream(path, ROWS),
    "file.arrow": lambda path: write_arrow_file(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_has_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    source = open_data_file(tmp_path / name)
    assert (source.num_rows, source.columns) == (2, ["prompt", "truth", "extra"])
    assert [row for batch in source.batches(["extra", "prompt"]) for row in batch] == [
        {"extra": row["extra"], "prompt": row["prompt"]} for row in ROWS
    ]
    assert source.table().to_pylist() == ROWS
    assert source.schema.field("truth").type in (pyarrow.string(), pyarrow.large_string())
    assert source.count_missing("extra") == 1


def test_errors_name_the_line_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert open_data_file(tmp_path / "a.jsonl").location(1).endswith("a.jsonl, line 3")
    (tmp_path / "a.csv").write_text('a,b\n"1\n2",3\n4,5\n')
    assert open_data_file(tmp_path / "a.csv").location(1).endswith("a.csv, line 4")
    (tmp_path / "a.json").write_text('[{"a": 1}, {"a": 2}]')
    assert open_data_file(tmp_path / "a.json").location(1).endswith("a.json, row 1")


def test_missing_fields_of_a_json_row_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"b": {"c": [2]}}\n')
    assert read_rows(tmp_path / "a.jsonl", ["a", "b"]).rows == [{"a": 1, "b": None}, {"a": None, "b": {"c": [2]}}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl, line 2: invalid JSON .*check that the file is complete"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl, line 2: the row is a list; each line must be an object"),
        ("a.txt", b"What is 1+1?", r"a\.txt, line 1: invalid JSON .*supported formats are parquet, JSON lines"),
        ("a.json", b'[{"a": 1}, 2]', r"a\.json, row 1: the row is a int; each row must be an object"),
        ("a.json", b'[{"a": 1},', r"a\.json: invalid JSON"),
        ("a.jsonl", b'{"a": "\xff"}', r"a\.jsonl cannot be read: .*utf-8"),
        ("a.csv", b"a,b\n1,2\n3\n", r"a\.csv, line 3: the row has 1 cells, but the header has 2"),
        ("a.csv", b"a,b,b\n1,2,3\n", r"a\.csv: two columns have the name 'b'; rename one of them"),
        ("a.csv", b'a,b\n1,"2\n', r"a\.csv cannot be read: unexpected end of data"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}', mtime=0)[:-9], r"a\.jsonl\.gz cannot be read"),
        ("a.parquet", b"PAR1 truncated", r"a\.parquet cannot be read"),
        ("a.arrow", b"ARROW1\0\0", r"a\.arrow cannot be read"),
        ("a.jsonl", b"", r"a\.jsonl has no rows"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\\ud83d"}', r"a\.jsonl, line 2: the text contains '\\ud83d', .* half"),
        ("a.json", b'[{"a": 1}, {"b": ["\\uDE00"]}]', r"a\.json, row 1: the text contains '\\ude00', .* half"),
        ("a.jsonl", nested(150), r"a\.jsonl, line 1: more than 100 brackets are nested"),
        ("a.jsonl", b'{"a": 1}\n' + nested(5000), r"a\.jsonl, line 2: more than 100 brackets are nested"),
        ("a.jsonl", b'{"a": 1}\n' + nested(100_000), r"a\.jsonl, line 2: more than 100 brackets are nested"),
        ("a.json", b"[" + nested(150) + b"]", r"a\.json, row 0: more than 100 brackets are nested"),
        ("a.json", b'[{"a": 1},\n ' + nested(5000) + b"]", r"a\.json, row 1: more than 100 brackets are nested"),
        ("a.jsonl", b'{"a": 1}\n{"a": 1, "a" : 2}', r"a\.jsonl, line 2: the key 'a' occurs twice"),
        ("a.jsonl", b'{"a": [{"role": "x", "role": "x"}]}', r"a\.jsonl, line 1: the key 'role' occurs twice"),
        ("a.json", b'[{"a": 1}, {"a": 1, "a": 1}]', r"a\.json, row 1: the key 'a' occurs twice"),
        ("a.jsonl.gz", flipped(gzip.compress(b'{"a": "x"}\n' * 99, mtime=0)), r"a\.jsonl\.gz cannot be read"),
    ],
)
def test_damaged_files_are_one_error(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BatchError, match=message):
        read_rows(tmp_path / name, ["a"])


def test_escaped_pairs_and_flat_brackets_are_ordinary_text(tmp_path: Path) -> None:
    row = {"a": "\U0001f600 " + "[{" * 500, "b": [[1]] * 500, "c": json.loads("[" * 90 + "]" * 90)}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (tmp_path / "a.json").write_text(json.dumps([row]))
    for name in ("a.jsonl", "a.json"):
        assert read_rows(tmp_path / name, ["a", "b", "c"]).rows == [row]


def test_two_columns_of_the_same_name_are_an_error(tmp_path: Path) -> None:
    table = pyarrow.table([[1], [2]], names=["a", "a"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(BatchError, match=rf"{name}: two columns have the name 'a'; rename one of them"):
            read_rows(tmp_path / name, ["a"])


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(257):
            file.write(b" " * 2**20)
    with pytest.raises(BatchError, match=r"a\.jsonl\.gz unpacks to more than 256 MiB, \d+ times its size"):
        read_rows(tmp_path / "a.jsonl.gz", ["a"])


def test_columns_of_a_csv_file_may_have_no_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,,\n1,,\n")
    assert read_rows(tmp_path / "a.csv", ["a"]).rows == [{"a": "1"}]


def test_a_column_of_different_types_has_no_arrow_type(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": "x"}\n')
    assert [row["a"] for row in read_rows(tmp_path / "a.jsonl", ["a"]).rows] == [1, "x"]
    with pytest.raises(BatchError, match="column 'a' has values of different types"):
        open_data_file(tmp_path / "a.jsonl").table()


def test_a_split_of_the_datasets_library_is_a_folder_of_data(tmp_path: Path) -> None:
    split = tmp_path / "saved" / "train"
    split.mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (split / "state.json").write_text("{}")
    (split / "dataset_info.json").write_text("{}")
    for shard in range(2):
        write_stream(split / f"data-0000{shard}-of-00002.arrow", [ROWS[shard]])
    write_stream(split / "cache-1f.arrow", [{"other": 1}])
    assert read_rows(data_files(split), ["prompt", "truth", "extra"]).rows == ROWS
    with pytest.raises(BatchError, match=r"several splits\. Set the folder of one split"):
        data_files(tmp_path / "saved")
