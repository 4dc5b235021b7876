"""Responses that are in parquet files already, to be scored: `camshaft eval`.

    found = read_answers(["responses.parquet"], AnswerColumns())
    found.batch                              # a row for each response: uid, data_source, ground_truth, extra_info
    found.texts                              # the response of each
    found.write("scored.parquet", "score", scores, answers)

A file has the responses to a question in one row, as a list, or in a row each, as texts. In a file of texts rows with
the same prompt and data set are one question.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from camshaft import storage
from camshaft.data.parquet import Paths, Table, read_parquet
from camshaft.data.prompts import ground_truth
from camshaft.data.responses import whole
from camshaft.dataproto import DataProto
from camshaft.errors import BatchError, ConfigError


@dataclass(frozen=True)
class AnswerColumns:
    """What the columns are called; the keys of `data` in the config."""

    prompt_key: str = "prompt"
    response_key: str = "responses"
    data_source_key: str = "data_source"
    reward_model_key: str = "reward_model"


@dataclass(frozen=True)
class Answers:
    """All responses of some files, one after the other."""

    batch: DataProto
    texts: list[str]
    sources: tuple[Path, ...]
    counts: tuple[int | None, ...]
    """How many each row of the files has; None where the row is one text."""

    def check_columns(self, name: str) -> None:
        """An error if the files have a column that `write` would add."""
        there = [column for column in _written(name) if column in whole(self.sources).column_names]
        if there:
            raise ConfigError(f"data.score_key: data.path has a column '{there[0]}' already. Type another name")

    def write(self, path: str | Path, name: str, scores: Sequence[float], answers: Sequence[str | None]) -> None:
        """The rows of the files with two more columns, which have a value for each response."""
        table = whole(self.sources).replace_schema_metadata(None)  # whose settings speak of the responses alone
        lists = any(count is not None for count in self.counts)
        for (column, kind), values in zip(_written(name).items(), (scores, answers), strict=True):
            rest = iter(values)
            cells = [next(rest) if count is None else [next(rest) for _ in range(count)] for count in self.counts]
            table = table.append_column(column, pyarrow.array(cells, pyarrow.list_(kind) if lists else kind))
        with storage.new_file(path) as work:
            parquet.write_table(table, work)


def read_answers(paths: Paths, columns: AnswerColumns) -> Answers:
    """Read and check."""
    required = [columns.response_key, columns.data_source_key]
    optional = [columns.prompt_key, columns.reward_model_key, "ground_truth", "extra_info"]
    table = read_parquet(paths, required, optional)
    found: dict[str, list[Any]] = {name: [] for name in ("uid", "data_source", "ground_truth", "extra_info")}
    texts: list[str] = []
    counts: list[int | None] = []
    questions: dict[str, str] = {}
    for i, row in enumerate(table.rows):
        given = row[columns.response_key]
        responses = _texts(given, table.place(i), columns.response_key)
        texts += responses
        counts.append(len(responses) if isinstance(given, list) else None)
        uid = str(i) if isinstance(given, list) else questions.setdefault(_question(table, i, columns), str(i))
        found["uid"] += [uid] * len(responses)
        found["data_source"] += [row[columns.data_source_key]] * len(responses)
        found["ground_truth"] += [ground_truth(row, columns.reward_model_key)] * len(responses)
        found["extra_info"] += [row.get("extra_info") or {}] * len(responses)
    return Answers(DataProto.from_dict(found), texts, table.files, tuple(counts))


def _written(name: str) -> dict[str, pyarrow.DataType]:
    """Columns of scores and answers, with what they hold of a response."""
    return {name: pyarrow.float64(), f"{name}_pred": pyarrow.string()}


def _texts(given: Any, place: str, key: str) -> list[str]:
    responses = given if isinstance(given, list) else [given]
    if not responses or not all(isinstance(text, str) for text in responses):
        said = "no response" if not responses else f"'{next(r for r in responses if not isinstance(r, str))}'"
        raise BatchError(f"{place}: the column '{key}' has {said}; it must hold a text, or a list of texts")
    return responses


def _question(table: Table, index: int, columns: AnswerColumns) -> str:
    """What rows with one response each have in common if they answer one question."""
    row = table.rows[index]
    if columns.prompt_key not in row:
        raise BatchError(
            f"{table.place(index)}: a row with one response needs its prompt, and there is no column "
            f"'{columns.prompt_key}'. Type data.prompt_key=... for the column that has it"
        )
    return json.dumps([row[columns.data_source_key], row[columns.prompt_key]], default=str)
