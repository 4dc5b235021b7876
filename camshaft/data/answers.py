"""Read existing responses from data files for `camshaft eval`, which scores them.

    responses = read_answers(["responses.parquet"], config.data)
    responses.batch                          # columns uid, data_source, ground_truth, extra_info; one row per response
    responses.texts                          # the text of each response
    responses.write("scored.parquet", "score", scores, answers)

A row of a file contains either a list of all responses to a prompt or a single response as a string. Rows with single
responses belong to the same prompt if they have the same prompt and data source.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from camshaft import storage
from camshaft.config.schema.evaluation import EvalDataConfig
from camshaft.data.prompts import DATA_SOURCE, ground_truth
from camshaft.data.responses import read_table
from camshaft.data.tables import Paths, Table, read_rows
from camshaft.dataproto import DataProto
from camshaft.errors import BatchError, ConfigError


@dataclass(frozen=True)
class Answers:
    """All responses of the files, in file and row order."""

    batch: DataProto
    texts: list[str]
    sources: tuple[Path, ...]
    counts: tuple[int | None, ...]
    """Number of responses in each file row; None if the row contains a single string."""

    def check_columns(self, name: str) -> None:
        """Raise ConfigError if the files already contain a column that `write` adds."""
        columns = read_table(self.sources).column_names
        taken = [column for column in _score_columns(name) if column in columns]
        if taken:
            raise ConfigError(f"data.score_key={name}: data.path already has a column '{taken[0]}'; use another name")

    def write(self, path: str | Path, name: str, scores: Sequence[float], answers: Sequence[str | None]) -> None:
        """Write the rows of the files with two more columns: the score and the extracted answer of each response."""
        # The schema metadata describes how the responses were generated, not the scores.
        table = read_table(self.sources).replace_schema_metadata(None)
        lists = any(count is not None for count in self.counts)
        for (column, kind), values in zip(_score_columns(name).items(), (scores, answers), strict=True):
            rest = iter(values)
            cells = [next(rest) if count is None else [next(rest) for _ in range(count)] for count in self.counts]
            table = table.append_column(column, pyarrow.array(cells, pyarrow.list_(kind) if lists else kind))
        with storage.new_file(path) as target:
            parquet.write_table(table, target)


def read_answers(paths: Paths, columns: EvalDataConfig) -> Answers:
    required = [columns.response_key]
    if columns.data_source_key != DATA_SOURCE:
        required.append(columns.data_source_key)
    table = read_rows(paths, required, None)
    names = ("uid", "data_source", "ground_truth", "extra_info", "data_row")
    batch: dict[str, list[Any]] = {name: [] for name in names}
    texts: list[str] = []
    counts: list[int | None] = []
    uids: dict[str, str] = {}
    for i, row in enumerate(table.rows):
        cell = row[columns.response_key]
        responses = _texts(cell, table.location(i), columns.response_key)
        texts += responses
        counts.append(len(responses) if isinstance(cell, list) else None)
        uid = str(i) if isinstance(cell, list) else uids.setdefault(_prompt_key(table, i, columns), str(i))
        batch["uid"] += [uid] * len(responses)
        batch["data_source"] += [row.get(columns.data_source_key) or "unknown"] * len(responses)
        batch["ground_truth"] += [ground_truth(row, columns.reward_model_key)] * len(responses)
        batch["extra_info"] += [row.get("extra_info") or {}] * len(responses)
        data_row = {name: value for name, value in row.items() if name != columns.response_key}
        batch["data_row"] += [data_row | {"prompt": row.get(columns.prompt_key)}] * len(responses)
    return Answers(DataProto.from_dict(batch), texts, table.files, tuple(counts))


def _score_columns(name: str) -> dict[str, pyarrow.DataType]:
    """Return the names and types of the columns with scores and extracted answers."""
    return {name: pyarrow.float64(), f"{name}_pred": pyarrow.string()}


def _texts(cell: Any, location: str, key: str) -> list[str]:
    responses = cell if isinstance(cell, list) else [cell]
    if not responses or not all(isinstance(text, str) for text in responses):
        value = "an empty list" if not responses else f"{next(r for r in responses if not isinstance(r, str))!r}"
        raise BatchError(f"{location}: column '{key}' contains {value}; use a string or a non-empty list of strings")
    return responses


def _prompt_key(table: Table, index: int, columns: EvalDataConfig) -> str:
    """Return a key that identifies the prompt of a row that holds a single response."""
    row = table.rows[index]
    if columns.prompt_key not in row:
        raise BatchError(
            f"{table.location(index)}: rows with a single response require a prompt column, but column "
            f"'{columns.prompt_key}' is missing; set data.prompt_key to the name of the prompt column"
        )
    return json.dumps([row.get(columns.data_source_key), row[columns.prompt_key]], default=str)
