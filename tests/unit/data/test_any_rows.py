"""Parquet files with arbitrary contents either load or raise an error of the package, in bounded time.

CAMSHAFT_EXAMPLES=10000 python -m pytest tests/unit/data/test_any_rows.py      # more examples than in the normal run
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from pyarrow import parquet

from camshaft.data import PromptOptions, SFTOptions, StatefulLoader, load_prompts, load_sft, summarize_files
from camshaft.dataproto import DataProto, Ragged
from camshaft.errors import CamshaftError

EXAMPLES = int(os.environ.get("CAMSHAFT_EXAMPLES", "20"))
"""Number of examples of each test."""

many = settings(
    max_examples=EXAMPLES,
    deadline=timedelta(seconds=10),
    derandomize="CAMSHAFT_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

text = st.text(max_size=12)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), text, st.binary(max_size=8),
    st.dates(), st.datetimes(), st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=0, max_value=9),
)  # fmt: skip
names = st.sampled_from(["role", "content", "ground_truth", "prompt_id", "name", "tool_calls"])
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, min_size=1, max_size=3)),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.one_of(text, text, text, st.none())}
    ),
    max_size=3,
)
prompts = st.one_of(text, messages, values)
types = st.sampled_from(
    [None, pyarrow.null(), pyarrow.large_string(), pyarrow.timestamp("ns"), pyarrow.duration("ns"), pyarrow.float16()]
)
columns = st.sampled_from(["prompt", "response", "messages", "data_source", "reward_model", "extra_info", "index"])


@st.composite
def tables(draw: st.DrawFn) -> pyarrow.Table:
    """Draw a table whose columns may contradict each other; most tables have a prompt column."""
    count = draw(st.integers(0, 4))
    chosen = draw(st.sets(columns, max_size=5)) | draw(st.sampled_from([set(), {"prompt", "data_source"}]))
    table_columns = {}
    for name in sorted(chosen):
        kind = prompts if name in ("prompt", "response", "messages") else st.one_of(text, values)
        cells = draw(st.lists(draw(st.sampled_from([kind, messages, text])), min_size=count, max_size=count))
        try:
            table_columns[name] = pyarrow.array(cells, draw(types))
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):  # these do not form one column
            table_columns[name] = pyarrow.array([str(cell) for cell in cells])
    return pyarrow.table(table_columns)


def written(table: pyarrow.Table, folder: Path) -> Path:
    path = folder / "any.parquet"
    try:
        parquet.write_table(table, path, row_group_size=2)
    except pyarrow.ArrowException:  # the format does not support every type
        parquet.write_table(table.select([]), path)
    return path


def names_the_file(error: CamshaftError, *of_all_rows: str) -> None:
    """Return True if the message names the file, or concerns all rows."""
    assert any(phrase in str(error) for phrase in ("any.parquet", *of_all_rows))


options = st.builds(
    PromptOptions,
    max_prompt_length=st.integers(1, 8),
    truncation=st.sampled_from(["error", "left", "right", "middle"]),
    filter_overlong=st.booleans(),
    prompt_id_key=st.sampled_from([None, "index"]),
    reward_fn_key=st.sampled_from([None, "data_source"]),
    return_raw_chat=st.booleans(),
    return_raw_input_ids=st.booleans(),
)


@many
@given(table=tables(), prompt_options=options, most=st.sampled_from([None, 1, 3]))
def test_any_rows_load_as_prompts_or_raise(
    table: Any, prompt_options: PromptOptions, most: int | None, tokenizer, tmp_path
):
    path = written(table, tmp_path)
    try:
        data = load_prompts(path, tokenizer, prompt_options, most)
    except CamshaftError as error:
        names_the_file(error, "drops all rows")
        return
    assert 0 < len(data.batch) == data.num_read - data.num_dropped
    lengths = data.batch["prompts"].lengths
    assert 1 <= int(lengths.min()) <= int(lengths.max()) <= prompt_options.max_prompt_length
    assert len(list(StatefulLoader(data.batch, 1, total_epochs=2))) == 2 * len(data.batch)


@many
@given(table=tables())
def test_any_rows_load_as_sequences_or_raise(table: Any, tokenizer, tmp_path):
    path = written(table, tmp_path)
    try:
        data = load_sft(path, tokenizer, SFTOptions(max_length=16, truncation="left"))
    except CamshaftError as error:
        names_the_file(error, "truncates all trained tokens")
        return
    assert data.batch["loss_mask"].values.any()


@many
@given(table=tables())
def test_any_file_has_statistics_or_raises(table: Any, tmp_path):
    path = written(table, tmp_path)
    try:
        (facts,) = summarize_files([path], table.column_names)
    except CamshaftError as error:
        names_the_file(error)
        return
    assert facts.num_rows == table.num_rows


@many
@given(data=st.data())
def test_any_bytes_load_or_raise(data: st.DataObject, tokenizer, tmp_path):
    """Load a valid file with some bytes overwritten or truncated, or arbitrary bytes."""
    path = tmp_path / "any.parquet"
    parquet.write_table(pyarrow.table({"data_source": ["s"] * 20, "prompt": [f"{i}+1" for i in range(20)]}), path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.sampled_from([None, None, None, 0, 7, len(content) - 9]))]))
    try:
        load_prompts(path, tokenizer, PromptOptions())
    except CamshaftError as error:
        names_the_file(error)


@many
@given(
    count=st.integers(1, 30),
    size=st.integers(1, 8),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
    flags=st.tuples(st.booleans(), st.booleans()),
    stop=st.integers(0, 40),
)
def test_loader_resumes_anywhere_with_the_remaining_rows(count, size, epochs, seed, flags, stop):
    rows = DataProto.from_dict(
        {"prompts": Ragged.from_rows([[i] for i in range(count)]), "uid": list(map(str, range(count)))}
    )
    shuffle, drop_last = flags
    size = min(size, count)

    def loader() -> StatefulLoader:
        return StatefulLoader(rows, size, total_epochs=epochs, shuffle=shuffle, seed=seed, drop_last=drop_last)

    batches = [batch["uid"].tolist() for batch in loader()]
    first, consumed = loader(), []
    state = first.state_dict()
    for batch in first:
        if len(consumed) == stop:
            break
        consumed.append(batch["uid"].tolist())
        state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    assert consumed + [batch["uid"].tolist() for batch in second] == batches


def test_a_value_without_python_equivalent_is_an_error(tokenizer, tmp_path: Path) -> None:
    after_year_9999 = pyarrow.array([2**55], pyarrow.timestamp("ms"))
    table = pyarrow.table({"prompt": ["x"], "data_source": ["s"], "extra_info": after_year_9999})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(CamshaftError, match=r"a\.parquet cannot be read"):
        load_prompts(tmp_path / "a.parquet", tokenizer, PromptOptions())
