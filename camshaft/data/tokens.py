"""Token ids of many prompts: made in several processes where that is faster, and kept for the next start.

    ids = tokenise(prompts, tokenizer, places, workers=None)       # Ragged, int32, a row for each prompt

Sets of `_MANY` rows or more are cut up over processes, and their ids are kept in `cache_folder("prompts")` under a
checksum of all that they depend on: the prompts, the tokenizer with its chat template, the versions of the libraries.
Limits of length are none of it: they may change without anything being tokenised again. Used by `prompts.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from camshaft.data.chat import Prompt, encode_prompts, watched
from camshaft.dataproto import Ragged
from camshaft.errors import BatchError
from camshaft.fetch import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MANY = 10_000
"""From so many rows on, processes share the work and the ids are kept (`benchmarks/results/tokenising.md`)."""
_MOST_WORKERS = 16
_CHUNK = 1000
_WATCH_SECONDS = 1.0

logger = logging.getLogger(__name__)


class _Work(NamedTuple):
    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    places: Sequence[str]

    def ids(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Flat ids and lengths of some rows."""
        rows = encode_prompts(self.prompts[start:stop], self.tokenizer, self.places[start:stop])
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter((token for row in rows for token in row), np.int32, int(lengths.sum())), lengths


def tokenise(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, places: Sequence[str], workers: int | None = None
) -> Ragged:
    """The ids of each prompt as a model sees it; an error names the place of a prompt that has none.

    `workers` processes at most; None: one for each CPU that this process may use, and no more than 16.
    """
    work = _Work(prompts, tokenizer, places)
    if len(prompts) < _MANY:
        return _joined([work.ids(0, len(prompts))])
    kept = _kept_at(work)
    found = None if kept is None else _read(kept, len(prompts))
    if found is not None:
        logger.info("the token ids of %d prompts are those of an earlier start (%s)", len(prompts), kept)
        return found
    found = _made(work, workers or min(_MOST_WORKERS, _usable_cpus()))
    if kept is not None:
        _write(kept, found)
    return found


def _joined(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Ragged:
    values, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Ragged(torch.from_numpy(values), torch.from_numpy(lengths))


# -- processes ------------------------------------------------------------------------------------


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count() or 1


def _made(work: _Work, workers: int) -> Ragged:
    count = len(work.prompts)
    spans = [(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
    if workers == 1 or "fork" not in multiprocessing.get_all_start_methods():
        return _joined([work.ids(*span) for span in watched(spans, "tokenising", count)])
    # A forked process has the prompts and the tokenizer already. It touches no device and no thread of this one.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(workers, len(spans)), context, _begin, (work, os.getpid()))
    try:
        futures = [pool.submit(_ids, *span) for span in spans]
        return _joined([future.result() for future in watched(futures, "tokenising", count)])
    except BrokenProcessPool as error:
        raise BatchError(
            f"a process that tokenises prompts was ended from outside, as happens when memory runs out ({error})"
            ". Fewer take less: data.filter_overlong_prompts_workers=1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_WORK: _Work | None = None
"""What a process of the pool works on."""


def _begin(work: _Work, driver: int) -> None:
    global _WORK
    _WORK = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each CPU
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to act on
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()


def _end_with(driver: int) -> None:
    """A pool does not notice that its driver was killed."""
    while os.getppid() == driver:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _ids(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    assert _WORK is not None
    return _WORK.ids(start, stop)


# -- what is kept ---------------------------------------------------------------------------------


def _kept_at(work: _Work) -> Path | None:
    """The file of these ids; None: the tokenizer is one of Python's own making, which nothing tells apart."""
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
        found = load_file(path)
        ids = Ragged(found["values"], found["lengths"])
    except (OSError, SafetensorError, KeyError, BatchError):
        return None  # there is none, or none that can be used
    return ids if len(ids) == count else None


def _write(path: Path, ids: Ragged) -> None:
    work = path.with_name(f"{path.name}.{os.getpid()}")  # another run may write the same
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"values": ids.values, "lengths": ids.lengths}, work)
        os.replace(work, path)
    except OSError as error:
        logger.warning("the token ids are not kept for the next start: %s (%s)", path.parent, error)
