"""Tokenize many prompts in parallel processes, with a cache on disk.

    ids = tokenize(prompts, tokenizer, locations, workers=None)       # Ragged int32 with one row per prompt

Data sets with at least `_MIN_PARALLEL_ROWS` rows are tokenized in several processes. Their token ids are cached in
`cache_folder("prompts")` under a checksum of the prompts, the tokenizer with its chat template, and the library
versions. The checksum does not cover length limits, so the cache stays valid when they change.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from camshaft import storage
from camshaft.data.chat import (
    NO_ARGUMENTS,
    Arguments,
    Prompt,
    encode_prompts,
    log_unread_arguments,
    render_prompt,
    track_progress,
)
from camshaft.data.templates import try_template
from camshaft.dataproto import Ragged
from camshaft.errors import BatchError
from camshaft.fetch import cache_folder
from camshaft.subprocesses import end_with

_MIN_PARALLEL_ROWS = 10_000
"""Minimum number of rows for which processes and the cache are used (`benchmarks/results/tokenising.md`)."""
_MAX_WORKERS = 16
_CHUNK = 1000

logger = logging.getLogger(__name__)


class _Job(NamedTuple):
    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    locations: Sequence[str]
    arguments: Sequence[Arguments]

    def tokenize(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated token ids and the lengths of rows `start` to `stop - 1`."""
        rows = encode_prompts(
            self.prompts[start:stop], self.tokenizer, self.locations[start:stop], self.arguments[start:stop]
        )
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter((token for row in rows for token in row), np.int32, int(lengths.sum())), lengths


def tokenize(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    locations: Sequence[str],
    workers: int | None = None,
    arguments: Sequence[Arguments] | None = None,
) -> Ragged:
    """Tokenize prompts; messages are formatted with the chat template. Errors report the row.

    `workers` is the maximum number of processes; None means one per available CPU, up to 16. `arguments` contains the
    arguments of the chat template for each prompt.
    """
    chat = next((row for row, prompt in enumerate(prompts) if not isinstance(prompt, str)), None)
    rows = [NO_ARGUMENTS] * len(prompts) if arguments is None else arguments
    log_unread_arguments(rows, chat is not None, tokenizer)
    if chat is not None:
        try_template(tokenizer, lambda: render_prompt(prompts[chat], tokenizer, locations[chat], rows[chat]))
    job = _Job(prompts, tokenizer, locations, rows)
    if len(prompts) < _MIN_PARALLEL_ROWS:
        return _concatenate([job.tokenize(0, len(prompts))])
    cache = _cache_path(job)
    ids = None if cache is None else _load_cached(cache, len(prompts))
    if ids is not None:
        logger.info("read cached token ids of %d prompts from %s", len(prompts), cache)
        return ids
    ids = _tokenize(job, workers or min(_MAX_WORKERS, _usable_cpus()))
    if cache is not None:
        _write(cache, ids)
    return ids


def _concatenate(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Ragged:
    values, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Ragged(torch.from_numpy(values), torch.from_numpy(lengths))


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _tokenize(job: _Job, workers: int) -> Ragged:
    count = len(job.prompts)
    spans = [(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
    if workers == 1:
        return _concatenate([job.tokenize(*span) for span in track_progress(spans, "tokenizing", count)])
    # Forking shares the prompts and the tokenizer. It is safe because the processes use neither devices nor threads
    # of this process.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(workers, len(spans)), context, _initialize_process, (job, os.getpid()))
    try:
        futures = [pool.submit(_tokenize_span, *span) for span in spans]
        return _concatenate([future.result() for future in track_progress(futures, "tokenizing", count)])
    except BrokenProcessPool as error:
        raise BatchError(
            f"a tokenizer process was killed, possibly because memory ran out ({error}); use fewer processes, for "
            "example data.filter_overlong_prompts_workers=1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_JOB: _Job | None = None
"""Job of a pool process, set by its initializer."""


def _initialize_process(job: _Job, driver_pid: int) -> None:
    global _JOB
    _JOB = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool already runs one process per CPU
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    end_with(driver_pid, partial(os._exit, 1))  # ProcessPoolExecutor does not end its processes if the driver is killed


def _tokenize_span(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    assert _JOB is not None
    return _JOB.tokenize(start, stop)


def _cache_path(job: _Job) -> Path | None:
    """Return the path of the cached ids; None for slow tokenizers, whose state cannot be serialized."""
    tokenizer: Any = job.tokenizer
    if not tokenizer.is_fast:
        return None
    template = json.dumps(tokenizer.chat_template)
    today = str(date.today()) if "strftime_now" in template else ""
    versions = [transformers.__version__, tokenizers.__version__]
    metadata = [type(tokenizer).__name__, template, tokenizer.special_tokens_map, today, versions]
    digest = hashlib.sha256(json.dumps(metadata, default=str).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    for prompt, arguments in zip(job.prompts, job.arguments, strict=True):
        digest.update(json.dumps([prompt, arguments] if arguments else prompt, default=repr).encode())
    return cache_folder("prompts") / f"{digest.hexdigest()}.safetensors"


def _load_cached(path: Path, count: int) -> Ragged | None:
    try:
        tensors = load_file(path)
        ids = Ragged(tensors["values"], tensors["lengths"])
    except (OSError, SafetensorError, KeyError, BatchError):
        return None  # missing or damaged
    return ids if len(ids) == count else None


def _write(path: Path, ids: Ragged) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another run may write the same file.
        with tempfile.TemporaryDirectory(prefix=".", dir=path.parent, ignore_cleanup_errors=True) as folder:
            work = Path(folder, path.name)
            save_file({"values": ids.values, "lengths": ids.lengths}, work)
            if _load_cached(path, len(ids)) is not None:
                return
            if os.path.lexists(path):  # it cannot be read
                storage.rename_aside(path)
            os.replace(work, path)
    except (OSError, SafetensorError) as error:
        logger.warning("could not cache the token ids in %s: %s", path.parent, error)
