"""Parts of responses and the file that they are merged into."""

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from camshaft.data.responses import ResponseFile
from camshaft.data.tables import write_parquet
from camshaft.errors import BatchError, ConfigError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write five rows with metadata and with types that Python objects would not preserve."""
    table = pyarrow.table(
        {
            "prompt": [f"p{i}" for i in range(5)],
            "small": pyarrow.array(range(5), pyarrow.int8()),
            "label": pyarrow.array(list("ababa")).dictionary_encode(),
        }
    )
    parquet.write_table(table.replace_schema_metadata({"owner": "me"}), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def file(folder: Path, **settings: Any) -> ResponseFile:
    return ResponseFile(folder / "out.parquet", "responses", settings)


def test_file_has_prompt_columns_and_those_of_all_parts(source: Path, tmp_path: Path) -> None:
    out = file(tmp_path, seed=1)
    with out.parts() as parts:
        parts.add(2, {"": [["a", "b"], ["c", ""]], "_tokens": [[1, 2], [3, 0]], "_pred": [["x", None], [None, None]]})
        parts.add(1, {"": [["d", "e"]], "_tokens": [[4, 5]], "_pred": [[None, None]]})
        out.write(source, [0, 2, 4], parts)
    output, original = parquet.ParquetFile(out.path).read(), parquet.ParquetFile(source).read()
    assert output.select(original.column_names).equals(original.take([0, 2, 4]))
    assert output.schema.field("small").type == pyarrow.int8()
    assert output.schema.metadata[b"owner"] == b"me"
    assert output.column("responses").to_pylist() == [["a", "b"], ["c", ""], ["d", "e"]]
    assert output.column("responses_tokens").to_pylist() == [[1, 2], [3, 0], [4, 5]]
    assert output.schema.field("responses_pred").type == pyarrow.list_(pyarrow.string())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]


def test_parts_are_reopened_in_order(source: Path, tmp_path: Path) -> None:
    for number in range(12):
        with file(tmp_path, seed=1).parts() as parts:
            assert (parts.num_done, len(parts)) == (100 * number, number)
            parts.add(100, {"": [[str(number)]] * 100})
    with file(tmp_path, seed=1).parts() as parts:
        assert parts.table().column("responses").to_pylist() == [
            [str(number)] for number in range(12) for _ in range(100)
        ]


def test_parts_after_a_missing_part_are_ignored(tmp_path: Path) -> None:
    with file(tmp_path).parts() as parts:
        for text in "abc":
            parts.add(1, {"": [[text]]})
        folder = parts.folder
    (folder / "from_000000001").rename(folder / "elsewhere")
    with file(tmp_path).parts() as parts:
        assert parts.num_done == 1
        parts.add(2, {"": [["B"], ["C"]]})
        assert parts.table().column("responses").to_pylist() == [["a"], ["B"], ["C"]]
    with file(tmp_path).parts() as parts:
        assert (parts.num_done, len(parts)) == (3, 2)


def test_settings_are_compared_by_value_and_differences_reported(source: Path, tmp_path: Path) -> None:
    with file(tmp_path, seed=1, stop=("a", "b"), place=Path("x")).parts() as parts:
        parts.add(1, {"": [["a"]]})
    with file(tmp_path, place="x", stop=["a", "b"], seed=1).parts() as parts:
        assert parts.num_done == 1
    with (
        pytest.raises(
            ConfigError, match=r"was started with different settings \(seed: 1 before, 2 now; n: null before, 3 now\)"
        ),
        file(tmp_path, place="x", stop=["a", "b"], seed=2, n=3).parts(),
    ):
        pass


def test_files_with_other_settings_are_rejected(source: Path, tmp_path: Path) -> None:
    out = file(tmp_path, seed=1)
    assert not out.exists()
    with out.parts() as parts:
        parts.add(5, {"": [["a"]] * 5})
        out.write(source, range(5), parts)
    assert file(tmp_path, seed=1).exists()
    with pytest.raises(ConfigError, match="already exists with different settings"):
        file(tmp_path, seed=2).exists()
    with pytest.raises(ConfigError, match="the file already exists"):
        ResponseFile(source, "responses", {"seed": 1}).exists()


def test_an_existing_response_column_is_an_error(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", [{"prompt": "1"}])
    b = write_parquet(tmp_path / "b.parquet", [{"prompt": "1", "responses_tokens": 3}])
    file(tmp_path).check_columns(a)
    with pytest.raises(ConfigError, match="already has a column 'responses_tokens'"):
        file(tmp_path).check_columns([a, b])


def test_incompatible_schemas_are_an_error(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", [{"prompt": "1", "id": 1}])
    b = write_parquet(tmp_path / "b.parquet", [{"prompt": "1", "id": "x"}])
    c = write_parquet(tmp_path / "c.parquet", [{"prompt": "1", "more": 0.5}])
    with pytest.raises(BatchError, match="have incompatible schemas"):
        file(tmp_path).check_columns([a, b])
    out = file(tmp_path)
    out.check_columns([a, c])
    with out.parts() as parts:
        parts.add(2, {"": [["x"], ["y"]]})
        out.write([a, c], [0, 1], parts)
    assert parquet.ParquetFile(out.path).read().select(["id", "more"]).to_pylist() == [
        {"id": 1, "more": None},
        {"id": None, "more": 0.5},
    ]
