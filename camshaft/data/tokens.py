"""Tokenize many prompts in parallel processes, with a cache on disk.

    ids = tokenize(prompts, tokenizer, places, workers=None)       # Ragged, int32, one row per prompt

Data sets of `_MIN_PARALLEL_ROWS` rows or more are split over processes. Their ids are cached in
`cache_folder("prompts")` under a checksum of the prompts, the tokenizer with its chat template, and the library
versions. Length limits are not part of the checksum, so changing them does not tokenize again. Used by `prompts.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from camshaft.data.chat import Prompt, encode_prompts, with_progress
from camshaft.dataproto import Ragged
from camshaft.errors import BatchError
from camshaft.fetch import cache_folder
from camshaft.subprocesses import end_with

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MIN_PARALLEL_ROWS = 10_000
"""Minimum number of rows for parallel processes and the cache (`benchmarks/results/tokenising.md`)."""
_MAX_WORKERS = 16
_CHUNK = 1000

logger = logging.getLogger(__name__)


class _Work(NamedTuple):
    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    places: Sequence[str]

    def ids(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return flat ids and lengths of rows `start` to `stop`."""
        rows = encode_prompts(self.prompts[start:stop], self.tokenizer, self.places[start:stop])
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter((token for row in rows for token in row), np.int32, int(lengths.sum())), lengths


def tokenize(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, places: Sequence[str], workers: int | None = None
) -> Ragged:
    """Tokenize prompts with the chat template applied; errors report the row.

    `workers` is the maximum number of processes; None: one per available CPU, at most 16.
    """
    work = _Work(prompts, tokenizer, places)
    if len(prompts) < _MIN_PARALLEL_ROWS:
        return _concatenate([work.ids(0, len(prompts))])
    cached = _cache_path(work)
    ids = None if cached is None else _read(cached, len(prompts))
    if ids is not None:
        logger.info("read cached token ids of %d prompts (%s)", len(prompts), cached)
        return ids
    ids = _tokenize(work, workers or min(_MAX_WORKERS, _usable_cpus()))
    if cached is not None:
        _write(cached, ids)
    return ids


def _concatenate(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Ragged:
    values, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Ragged(torch.from_numpy(values), torch.from_numpy(lengths))


# -- processes ------------------------------------------------------------------------------------


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count() or 1


def _tokenize(work: _Work, workers: int) -> Ragged:
    count = len(work.prompts)
    spans = [(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
    if workers == 1 or "fork" not in multiprocessing.get_all_start_methods():
        return _concatenate([work.ids(*span) for span in with_progress(spans, "tokenizing", count)])
    # Forked processes inherit the prompts and the tokenizer. They use no device and no thread of this process.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(workers, len(spans)), context, _begin, (work, os.getpid()))
    try:
        futures = [pool.submit(_ids, *span) for span in spans]
        return _concatenate([future.result() for future in with_progress(futures, "tokenizing", count)])
    except BrokenProcessPool as error:
        raise BatchError(
            f"a tokenizer process was killed, possibly because memory ran out ({error}); use fewer processes: "
            "data.filter_overlong_prompts_workers=1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_WORK: _Work | None = None
"""The work of a pool process, set by its initializer."""


def _begin(work: _Work, driver: int) -> None:
    global _WORK
    _WORK = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool already has one process per CPU
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    end_with(driver, partial(os._exit, 1))  # the pool itself does not detect that the driver was killed


def _ids(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    assert _WORK is not None
    return _WORK.ids(start, stop)


# -- cache ----------------------------------------------------------------------------------------


def _cache_path(work: _Work) -> Path | None:
    """Return the cache file of the ids; None for slow tokenizers, whose state has no serialized form."""
    tokenizer: Any = work.tokenizer
    if not tokenizer.is_fast:
        return None
    template = json.dumps(tokenizer.chat_template)
    today = str(date.today()) if "strftime_now" in template else ""
    versions = [transformers.__version__, tokenizers.__version__]
    facts = [type(tokenizer).__name__, template, tokenizer.special_tokens_map, today, versions]
    digest = hashlib.sha256(json.dumps(facts, default=str).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    for prompt in work.prompts:
        digest.update(json.dumps(prompt, default=repr).encode())
    return cache_folder("prompts") / f"{digest.hexdigest()}.safetensors"


def _read(path: Path, count: int) -> Ragged | None:
    try:
        tensors = load_file(path)
        ids = Ragged(tensors["values"], tensors["lengths"])
    except (OSError, SafetensorError, KeyError, BatchError):
        return None  # missing or damaged
    return ids if len(ids) == count else None


def _write(path: Path, ids: Ragged) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")  # another run may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"values": ids.values, "lengths": ids.lengths}, temporary)
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("the token ids are not cached: %s (%s)", path.parent, error)
