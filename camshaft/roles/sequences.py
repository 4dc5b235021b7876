"""Rows of a batch that are several sequences for the model: episodes of programs whose session has several rows.

A batch has one row for each episode, so groups, advantages and mini-batches count episodes. If the session of a program
has several rows (docs/agents.md), the column `responses` contains the tokens behind the first prompt, and then all
tokens of the further rows, with their prompts. `sequence_lengths` has a pair of numbers for every row of the session,
including the first: the tokens of its prompt in `responses` (0 for the first), and the tokens behind it. The model
computes each sequence alone. The tokens keep their order, so only the lengths of rows change:

    sequences = split_rows(rows)                    # for the engine: one row for each sequence
    predictions = whole_rows(predictions, rows)     # of the engine: one row for each episode again

In a loss, an episode has the weight of one row, however many sequences it has: the weights of its sequences are their
shares of its masked-in tokens. All modes of aggregation then give what they give for one row with all of these tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from camshaft.dataproto import DataProto, Ragged
from camshaft.ragged import on_last_token

SEQUENCES = "sequence_lengths"
"""Column of a batch whose rows can be several sequences."""

_PER_TOKEN = ("input_ids", "loss_mask")
"""Columns that have values for the tokens of the prompt too."""


def split_rows(data: DataProto) -> DataProto:
    """Return a batch with a row for each sequence, and the column `sequence_weight`.

    The further sequences of a row have an empty prompt, and all of their tokens in `responses`. `row_lengths` of its
    `meta_info` are the lengths of `responses` before.
    """
    parts, responses = data.ragged(SEQUENCES), data.ragged("responses").lengths
    row, lengths = parts.row_ids(), parts.values.sum(dim=-1)
    prompts = torch.where(parts.positions() == 0, data.ragged("prompts").lengths[row], 0)
    others = data.drop(SEQUENCES)
    columns = others.reorder(row).columns
    for name, column in others.columns.items():
        if isinstance(column, Ragged):
            is_longer = name in _PER_TOKEN
            columns[name] = Ragged(column.values, prompts if name == "prompts" else lengths + is_longer * prompts)
    counts = Ragged(data["response_mask"].values, lengths).sum().float()
    weights = counts / counts.new_zeros(len(data)).index_add(0, row, counts).clamp(min=1)[row]
    return DataProto(columns | {"sequence_weight": weights}, data.meta_info).with_meta(row_lengths=responses)


def whole_rows(predictions: Mapping[str, Any], data: DataProto) -> Mapping[str, Any]:
    """Return the predictions for the sequences of `data` as predictions for its rows."""
    return with_lengths(predictions, data.ragged("prompts").lengths + data.ragged("responses").lengths)


def with_lengths(columns: Mapping[str, Any], lengths: Tensor) -> dict[str, Any]:
    """Return columns with the same values per token in rows of other `lengths`."""
    return {name: Ragged(c.values, lengths) if isinstance(c, Ragged) else c for name, c in columns.items()}


def last_sequences(data: DataProto) -> DataProto:
    """Return the batch with `prompts`, `responses` and `response_mask` of the last sequence of each row."""
    sequences = split_rows(data.select("prompts", "responses", "response_mask", SEQUENCES))
    last = sequences.reorder(data.ragged(SEQUENCES).lengths.cumsum(0) - 1)
    return data.with_columns(**last.select("prompts", "responses", "response_mask").columns)


def scores_of_rows(scores: DataProto, data: DataProto) -> DataProto:
    """Return the column `rm_scores` of last sequences as one of the rows of `data`."""
    whole = on_last_token(scores.ragged("rm_scores").sum(), data.ragged("response_mask"))
    return scores.with_columns(rm_scores=whole)
