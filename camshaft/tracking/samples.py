"""Write the responses of each training step to `samples/step_<n>.parquet` in the run folder.

    samples = SampleWriter(folder, config.trainer.samples, decode)
    samples.write(batch, step)                  # after the updates; `batch` has the columns of a whole step

A file has one row per response: prompt, response, score and its parts. A few rows and their groups also have one value
per token: log-probs, advantage, value, ... docs/run-folder.md lists the columns. When the files together exceed
`max_gb`, older ones are deleted, so that the kept steps become sparser with age. A full disk causes one warning.
"""

import contextlib
import itertools
import json
import logging
import os
import random
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from torch import Tensor

from camshaft import storage
from camshaft.config.schema.trainer import SamplesConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.storage import rename_existing
from camshaft.tracking.durable import Ranges, format_steps, missing_steps, step_ranges
from camshaft.tracking.run_folder import SAMPLES, TOKEN_COLUMNS

Decode = Callable[[list[list[int]]], list[str]]

MAX_TOKENS = 1 << 17
"""Maximum number of tokens with values in a file. At least one response has values, whatever its length."""
RECENT_STEPS = 8
"""Number of newest steps that are deleted last."""

_FILE = re.compile(r"step_(\d+)\.parquet")
_COLUMNS = {"uid", "data_source", "prompt", "response", "ground_truth", "score", "prompt_tokens", "response_tokens"}
"""Columns by which files of this module are recognized."""
_JSON = json.JSONEncoder(ensure_ascii=False, default=str)

logger = logging.getLogger(__name__)


class SampleWriter:
    """Writer of the files of one run, within a limit of their total size."""

    def __init__(self, folder: Path, config: SamplesConfig, decode: Decode):
        self.folder, self.config = folder.expanduser() / SAMPLES, config
        self._decode = decode
        self._pieces: dict[int, str] = {}
        """Text of each token that has occurred."""
        # Arrays, because a long run has a file for each of its steps.
        self._steps, self._sizes = array("q"), array("q")
        """Steps of the files in ascending order, and their sizes in bytes."""
        self._has_failed = False

    def start(self, resumed_step: int | None, recorded: Ranges = ()) -> None:
        """Delete files after the checkpoint of a run that resumes. A new run renames the folder of an earlier one.

        Files that this class has not written remain. If files of the `recorded` steps, as `stored_steps` returned them,
        are missing or empty, log a warning.
        """
        if resumed_step is None:
            if self.folder.is_dir():
                rename_existing(self.folder)
            return
        sizes: dict[int, int] = {}
        later_bytes = 0
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = _FILE.fullmatch(path.name)
            try:
                if match is None:
                    storage.remove_unfinished(path)
                    continue
                size = path.stat().st_size
                if int(match[1]) > resumed_step:
                    _remove(path)
                    later_bytes += size
                elif size:
                    sizes[int(match[1])] = size
            except OSError as error:
                message = "the responses in %s cannot be accessed: %s. The run continues without them"
                logger.warning(message, path, error.strerror or error)
        for step in sorted(sizes):
            self._record(step, sizes[step])
        lost = missing_steps(recorded, sizes, resumed_step)
        if lost and later_bytes <= self._limit() // 2:  # otherwise later steps may have caused their deletion
            message = "%s lacks the responses of steps %s, which it contained when step %d was saved"
            logger.warning(message, self.folder, format_steps(lost), resumed_step)

    def stored_steps(self) -> Ranges:
        """Return the steps whose files cannot be missing later, unless they are lost.

        These are all stored ones, or none once the limit of the size is near, which deletes files.
        """
        return step_ranges(self._steps) if sum(self._sizes) <= self._limit() // 2 else []

    def write(self, batch: DataProto, step: int) -> Path:
        """Write the responses of a step, delete older files that exceed the limit, and return the path.

        If the file cannot be written, a warning is logged once.
        """
        path = self.folder / f"step_{step}.parquet"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            table = sample_table(batch, step, self.config.token_rows, self._decode, self._pieces)
            if os.path.lexists(path):
                rename_existing(path)
            with storage.new_file(path, durable=False) as work:
                parquet.write_table(table, work, compression="zstd", compression_level=1, use_dictionary=False)
            self._record(step, path.stat().st_size)
            self._prune()
        except OSError as error:
            if not self._has_failed:
                message = "the responses of step %d cannot be written to %s: %s. The run continues without them"
                logger.warning(message, step, self.folder, error.strerror or error)
            self._has_failed = True
        return path

    def _record(self, step: int, size: int) -> None:
        self._steps.append(step)
        self._sizes.append(size)

    def _limit(self) -> int:
        """Return the maximum size of all files in bytes."""
        return int(self.config.max_gb * 1e9)

    def _prune(self) -> None:
        while sum(self._sizes) > self._limit() and len(self._steps) > 1:
            index = least_useful(self._steps)
            _remove(self.folder / f"step_{self._steps.pop(index)}.parquet")
            self._sizes.pop(index)


def _remove(path: Path) -> None:
    """Delete a file of responses, unless it is missing, damaged or not one of `SampleWriter`."""
    with contextlib.suppress(FileNotFoundError, pyarrow.ArrowInvalid):
        if set(parquet.read_schema(path).names) >= _COLUMNS:
            path.unlink()


def least_useful(steps: Sequence[int]) -> int:
    """Return the index of the step to delete: the one whose absence leaves the smallest gap in relation to its age.

    The gaps between the remaining steps grow in proportion to their age. The first step and the most recent ones are
    deleted last.
    """
    candidates = range(1, len(steps) - RECENT_STEPS)
    return min(candidates, key=lambda i: (steps[i + 1] - steps[i - 1]) / (steps[-1] - steps[i]), default=0)


def sample_table(batch: DataProto, step: int, token_rows: int, decode: Decode, pieces: dict[int, str]) -> pyarrow.Table:
    """Return the table of a step. `pieces` is a cache of the texts of single tokens."""
    responses, scores = batch.ragged("responses"), batch.ragged("token_level_scores").sum()
    ids = _rows_of_ids(responses)
    texts = decode(ids)
    columns: dict[str, Any] = {
        "row": np.arange(len(batch), dtype=np.int32),
        "uid": [_escape(str(uid)) for uid in batch["uid"]],
        "data_source": [_escape(str(source)) for source in batch["data_source"]],
        "prompt": _prompt_texts(batch, decode),
        "response": texts,
        "ground_truth": [_as_text(truth) for truth in batch["ground_truth"]],
        "score": _numbers(scores),
        "reward": _numbers(batch.ragged("token_level_rewards").sum()),
        "advantage": _numbers(_masked_mean(batch.ragged("advantages"), batch.ragged("response_mask"))),
        "gap": _numbers(gaps := _gap(batch)),
        "prompt_tokens": batch["prompts"].lengths.to(torch.int32).numpy(),
        "response_tokens": responses.lengths.to(torch.int32).numpy(),
        "finished": batch["finished"].tolist(),
        "failure": pyarrow.array(batch["score_failure"].tolist(), pyarrow.string()),
    }
    parts = batch["score_parts"].tolist()
    for name in sorted({name for row in parts for name in row}):
        columns[f"score/{name}"] = pyarrow.array([row.get(name) for row in parts], pyarrow.float32())
    if "transcript" in batch:
        columns |= {
            "turns": batch["turns"].to(torch.int32).numpy(),
            "stop_reason": batch["stop_reason"].tolist(),
            "messages": conversations(batch),
        }
    chosen = choose_rows(
        batch["uid"].tolist(), scores.tolist(), gaps.tolist(), responses.lengths.tolist(), token_rows, step
    )
    is_chosen = np.zeros(len(batch), dtype=bool)
    is_chosen[chosen] = True
    lengths = responses.lengths.numpy()
    offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths * is_chosen)]), pyarrow.int32())

    def lists(values: Any, kind: pyarrow.DataType) -> pyarrow.Array:
        """Return a list column, which is null in the rows that are not chosen."""
        return pyarrow.ListArray.from_arrays(offsets, pyarrow.array(values, kind), mask=pyarrow.array(~is_chosen))

    ends = [token_ends(ids[row], texts[row], decode, pieces) for row in chosen]
    columns["token_ends"] = lists(list(itertools.chain(*ends)), pyarrow.int32())
    is_chosen_token = np.repeat(is_chosen, lengths)
    if "transcript" in batch:
        columns["sampled"] = lists(batch["response_mask"].values.numpy()[is_chosen_token], pyarrow.bool_())
    for name in TOKEN_COLUMNS:
        if name in batch:
            columns[name] = lists(_numbers(batch.ragged(name).values)[is_chosen_token], pyarrow.float32())
    return pyarrow.table(columns)


def conversations(batch: DataProto) -> list[str]:
    """Return the messages of each episode as JSON, with `reward` and the options `sampling` of each answer."""
    masks, scores = (batch.ragged(name).rows() for name in ("response_mask", "env_scores"))
    parts = [[len(mask)] for mask in masks]
    if "sequence_lengths" in batch:
        parts = [row.sum(dim=-1).tolist() for row in batch.ragged("sequence_lengths").rows()]
    texts: list[str] = []
    columns = (batch["transcript"], batch["answer_options"], masks, scores, parts)
    for messages, options, mask, rewards, lengths in zip(*columns, strict=True):
        is_end = mask & ~torch.cat([mask[1:], mask.new_zeros(1)])
        answers = _sampled_answers(messages, [int(ends.sum()) for ends in is_end.split(lengths)])
        added: dict[int, dict[str, Any]] = {number: {} for number in answers}
        for number, reward in zip(reversed(answers), reversed(rewards[is_end].tolist()), strict=False):
            added[number]["reward"] = reward
        for number, changed in zip(reversed(answers), reversed(options), strict=False):
            added[number] |= {"sampling": changed} if changed else {}
        texts.append(
            _escape(_JSON.encode([{**message, **added.get(number, {})} for number, message in enumerate(messages)]))
        )
    return texts


def _sampled_answers(messages: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> list[int]:
    """Return the numbers of the messages that were sampled: the last answers of each row of a session.

    Each further row begins with a message that has a field `row`. `counts` are the numbers of answers of the rows.
    """
    answers: list[list[int]] = [[]]
    for number, message in enumerate(messages):
        if "row" in message and len(answers) < len(counts):
            answers.append([])
        if message["role"] == "assistant":
            answers[-1].append(number)
    return [number for row, count in zip(answers, counts, strict=True) for number in row[max(0, len(row) - count) :]]


def choose_rows(
    uids: Sequence[Any], scores: Sequence[float], gaps: Sequence[float], lengths: Sequence[int], count: int, seed: int
) -> list[int]:
    """Return the rows with values per token: the best, the worst, that with the largest gap and random ones.

    All rows of their groups are included, until `count` rows or `MAX_TOKENS` are reached.
    """
    groups: dict[Any, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(uid, []).append(row)
    rows = range(len(uids))
    first = [max(rows, key=gaps.__getitem__), max(rows, key=scores.__getitem__), min(rows, key=scores.__getitem__)]
    others = random.Random(seed).sample(list(groups), len(groups))
    chosen: dict[int, None] = {}
    num_tokens = 0
    for uid in dict.fromkeys([*(uids[row] for row in first), *others]):
        # Only the first group may be cut to fit the limits. Later groups are included completely or not at all.
        group = sorted(groups[uid], key=lambda row: row not in first)
        if chosen and (len(chosen) + len(group) > count or num_tokens + sum(lengths[r] for r in group) > MAX_TOKENS):
            continue
        for row in group:
            if len(chosen) < count and (not chosen or num_tokens + lengths[row] <= MAX_TOKENS):
                chosen[row] = None
                num_tokens += lengths[row]
    return sorted(chosen)


def token_ends(ids: Sequence[int], text: str, decode: Decode, pieces: dict[int, str]) -> list[int]:
    """Return the end of each token in the text of a response, in characters.

    Tokens that are a part of a character end where the character begins, except for the last of them.
    """
    new_ids = [token for token in dict.fromkeys(ids) if token not in pieces]
    if new_ids:
        pieces.update(zip(new_ids, decode([[token] for token in new_ids]), strict=True))
    ends, position = [], 0
    for token in ids:
        position = _end_of(pieces[token].strip("\ufffd"), text, position)
        ends.append(position)
    if ends:
        ends[-1] = len(text)
    return ends


def _end_of(piece: str, text: str, position: int) -> int:
    """Return the end of a piece of `text` at or shortly after `position`, or `position` if it does not occur."""
    if not piece or text.startswith(piece, position):
        return position + len(piece)
    start = text.find(piece, position, position + len(piece) + 8)
    return position if start < 0 else start + len(piece)


def _prompt_texts(batch: DataProto, decode: Decode) -> list[str]:
    """Decode each prompt once, because the rows of a group have the same prompt."""
    rows = [tuple(row) for row in _rows_of_ids(batch.ragged("prompts"))]
    unique = list(dict.fromkeys(rows))
    texts = dict(zip(unique, decode([list(row) for row in unique]), strict=True))
    return [texts[row] for row in rows]


def _gap(batch: DataProto) -> Tensor:
    """Return the mean absolute difference of old and rollout log-probs of each response, (B,)."""
    if "old_log_probs" not in batch:
        return torch.full((len(batch),), torch.nan)
    old, rollout = batch.ragged("old_log_probs"), batch.ragged("rollout_log_probs")
    return _masked_mean(old.like((old.values - rollout.values).abs()), batch.ragged("response_mask"))


def _masked_mean(values: Ragged, mask: Ragged) -> Tensor:
    """Return the mean of each row over its masked-in tokens, (B,); nan for a row without such tokens."""
    kept = values.like(torch.where(mask.values, values.values.float(), 0.0))
    return kept.sum() / mask.sum()


def _numbers(values: Tensor) -> np.ndarray[Any, Any]:
    return values.float().cpu().numpy()


def _rows_of_ids(tokens: Ragged) -> list[list[int]]:
    """Return the token ids of each row. One conversion of all of them takes less time than one per row."""
    ids, offsets = tokens.values.tolist(), tokens.offsets.tolist()
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]


def _as_text(value: Any) -> str:
    """Return a text, or the JSON of another value."""
    return _escape(value if isinstance(value, str) else _JSON.encode(value))


def _escape(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()
