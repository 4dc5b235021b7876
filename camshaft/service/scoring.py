"""Log-probs that a request for samples asks for beside the samples, and their place in the answer.

    wanted = read_wanted(request, tokens, limits)       # raises CommandError
    wanted.add_prompt(message, scores)                  # columns of `ServedWorker.score` for the prompt
    wanted.add_samples(message, scores)                 # for the prompt with each of its samples

A prompt is scored once for all of its samples. Log-probs of prompts are those of the model at temperature 1; those of
the most probable tokens of samples belong to the distribution that is sampled from, like those of sampled tokens. The
first token of a prompt has none, which is NaN on the wire, and an empty cell in tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from camshaft.dataproto import DataProto
from camshaft.service.codec import Limits
from camshaft.service.errors import CommandError
from camshaft.wire import messages
from camshaft.wire.schemas import Sample, TokenTable

MAX_CELLS = 2**22
"""Maximum number of entries of a table of log-probs."""
EMPTY = -99999.0
"""Log-prob of an empty cell of a table of the most probable tokens, whose token id is 0."""


@dataclass(frozen=True)
class Widths:
    """Extent of the log-probs that a request asks for. Only requests with equal widths are executed together."""

    has_prompt: bool = False
    """True if log-probs of the tokens of the prompt are requested."""
    top_k: int = 0
    """Number of most probable tokens at each position of the prompt."""
    candidates: int = 0
    """Number of candidates at each position of the prompt."""
    sample_top_k: int = 0
    """Number of most probable tokens at each position of the samples."""

    @property
    def scores_prompts(self) -> bool:
        return self.has_prompt or self.top_k > 0 or self.candidates > 0


@dataclass(frozen=True)
class Candidates:
    """Token ids whose log-probs a request asks for, row i for position i + 1 of the prompt; -1 asks for nothing."""

    ids: Tensor
    """(T - 1, K)."""
    crow: np.ndarray | None = None
    """Row pointers and columns of a sparse table (CSR)."""
    columns: np.ndarray | None = None

    def of_prompt(self) -> Tensor:
        """Return the ids in place of each token of the prompt, (T, K)."""
        return torch.cat([torch.full_like(self.ids[:1], -1), self.ids])

    def write(self, message: Any, log_probs: np.ndarray) -> None:
        """Set a tensor of the wire with the layout of the request. A cell that asked for nothing is 0."""
        values = np.nan_to_num(log_probs[1:], nan=0.0, neginf=-np.inf).astype("<f4")
        message.dtype = messages.NUMBERS["DTYPE_FLOAT32"]
        message.shape.extend(self.ids.shape)
        if self.crow is None or self.columns is None:
            message.dense = values.tobytes()
            return
        rows = np.repeat(np.arange(len(self.ids)), np.diff(self.crow))
        message.sparse_csr.values = values[rows, self.columns].tobytes()
        message.sparse_csr.crow_indices = self.crow.astype("<i8").tobytes()
        message.sparse_csr.col_indices = self.columns.astype("<i8").tobytes()


@dataclass(frozen=True)
class Wanted:
    """Log-probs that a request asks for."""

    widths: Widths
    last_n: int
    """Number of tokens at the end of the prompt whose log-probs are returned."""
    candidates: Candidates | None

    def add_prompt(self, message: Any, scores: DataProto) -> None:
        """Add the log-probs of the prompt, the only row of the batch, to the answer."""
        if self.widths.has_prompt:
            values = scores.ragged("log_probs").values.numpy().astype("<f4")
            values[: -self.last_n] = np.nan
            message.prompt_logprobs = values.tobytes()
        if self.widths.top_k:
            ids, values = (scores.ragged(name).values.numpy().copy() for name in ("top_tokens", "top_log_probs"))
            values[: -self.last_n] = np.nan
            _write_table(message.topk_prompt_logprobs, ids, values)
        if self.candidates is not None:
            log_probs = scores.ragged("candidate_log_probs").values.numpy()
            self.candidates.write(message.target_prompt_logprobs, log_probs)

    def add_samples(self, message: Any, scores: DataProto) -> None:
        """Add the most probable tokens to the samples of the answer, given those of each prompt with its sample."""
        columns = scores.ragged("top_tokens").rows(), scores.ragged("top_log_probs").rows()
        for sequence, ids, log_probs in zip(message.sequences, *columns, strict=True):
            first = len(ids) - len(sequence.tokens) // 4
            _write_table(sequence.topk_sampled_logprobs, ids[first:].numpy(), log_probs[first:].numpy())


def _write_table(message: Any, ids: np.ndarray, log_probs: np.ndarray) -> None:
    """Set a table of the most probable tokens. Positions and tokens without a log-prob are empty cells."""
    is_empty = ~np.isfinite(log_probs)
    message.length, message.k = log_probs.shape
    message.token_ids = np.where(is_empty, 0, ids).astype("<i4").tobytes()
    message.logprobs = np.where(is_empty, EMPTY, log_probs).astype("<f4").tobytes()


def read_wanted(request: Sample, tokens: Sequence[int], limits: Limits) -> Wanted:
    """Return the log-probs that a request asks for. Raise `CommandError` if the server does not return them."""
    if request.prompt_alt_tokens_k:
        raise CommandError(
            f"prompt_alt_tokens_k={request.prompt_alt_tokens_k} is not supported by this server; request "
            "topk_prompt_logprobs, and draw from these tokens in the script"
        )
    length, candidates = len(tokens), None
    if request.target_prompt_logprobs is not None:
        candidates = _read_candidates(request.target_prompt_logprobs, length, limits)
    top_k = request.topk_prompt_logprobs or 0
    _check_width("topk_prompt_logprobs", top_k, length, limits)
    sample_top_k, max_tokens = request.topk_sample_logprobs or 0, request.sampling_params.max_tokens
    num_sampled = limits.context - length if max_tokens is None else min(max_tokens, limits.context - length)
    _check_width("topk_sample_logprobs", sample_top_k, num_sampled * request.num_samples, limits)
    widths = Widths(
        bool(request.prompt_logprobs), top_k, 0 if candidates is None else candidates.ids.shape[1], sample_top_k
    )
    return Wanted(widths, _read_last_n(request, length), candidates)


def _read_last_n(request: Sample, length: int) -> int:
    last_n = request.prompt_logprobs_last_n
    if last_n is None:
        return length
    if not request.prompt_logprobs:
        raise CommandError(
            f"prompt_logprobs_last_n={last_n} selects log-probs of the prompt; set include_prompt_logprobs, too"
        )
    if not 1 <= last_n < length:
        raise CommandError(
            f"prompt_logprobs_last_n={last_n} is not from 1 to {length - 1}, the number of tokens of the prompt that "
            "have a log-prob; leave it out to get them all"
        )
    return last_n


def _check_width(name: str, width: int, length: int, limits: Limits) -> None:
    if not 0 <= width <= limits.vocabulary:
        raise CommandError(f"{name}={width} is not from 0 to {limits.vocabulary}, the number of token ids of the model")
    if width * length > MAX_CELLS:
        raise CommandError(
            f"{name}={width} for {length} tokens are {width * length} log-probs; this server returns up to {MAX_CELLS} "
            "of a request, so ask for fewer"
        )


def _read_candidates(table: TokenTable, length: int, limits: Limits) -> Candidates:
    """Return the table of a request, whose rows belong to the positions of the prompt but the first."""
    name, shape = "target_prompt_logprobs", table.shape or [len(table.data)]
    if table.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise CommandError(
            f"{name} is {table.dtype} of shape {shape}; give token ids (int64) of shape [{length - 1}, K], one row for "
            "each token of the prompt but the first, with -1 where nothing is asked for"
        )
    if shape[0] * shape[1] > MAX_CELLS:
        raise CommandError(f"{name} has the shape {shape}; this server accepts up to {MAX_CELLS} cells")
    values = np.array(table.data, np.int64)
    crow, columns = None, None
    if table.sparse_crow_indices is None or table.sparse_col_indices is None:
        if len(values) != shape[0] * shape[1]:
            raise CommandError(f"{name} has {len(values)} ids, but its shape is {shape}; send matching data")
        ids = values.reshape(shape)
    else:
        crow, columns = np.array(table.sparse_crow_indices, np.int64), np.array(table.sparse_col_indices, np.int64)
        ids = _read_sparse(name, values, crow, columns, shape)
    if len(invalid := ids[(ids < -1) | (ids >= limits.vocabulary)]):
        raise CommandError(
            f"{name} contains the token id {invalid[0]}, but those of the model are 0..{limits.vocabulary - 1}; use "
            "the tokenizer of this model, and -1 where nothing is asked for"
        )
    if not (ids >= 0).any():
        raise CommandError(f"{name} asks for nothing; give at least one token id")
    return Candidates(torch.from_numpy(ids), crow, columns)


def _read_sparse(name: str, values: np.ndarray, crow: np.ndarray, columns: np.ndarray, shape: list[int]) -> np.ndarray:
    """Return a sparse table (CSR) with -1 in the cells that it does not list."""
    is_valid = len(crow) == shape[0] + 1 and crow[0] == 0 and crow[-1] == len(columns) == len(values)
    is_valid = is_valid and bool((np.diff(crow) >= 0).all() and ((columns >= 0) & (columns < shape[1])).all())
    if not is_valid:
        raise CommandError(
            f"{name} has {len(values)} ids, {len(crow)} row pointers and {len(columns)} column indices, which are no "
            f"sparse table of shape {shape}; use TensorData.from_torch_sparse of the SDK"
        )
    ids = np.full(shape, -1, np.int64)
    ids[np.repeat(np.arange(shape[0]), np.diff(crow)), columns] = values
    return ids
