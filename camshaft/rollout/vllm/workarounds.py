"""What is no public API of vLLM: each function is there for a mistake of vLLM's that would go unnoticed.

They were written against the versions in `installed.TESTED`, and the tests show each mistake with its function
taken out. Functions of a model are for `LLM.apply_model`, functions of a worker for `LLM.collective_rpc`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from camshaft.digest import digest

RELOADING = "vllm.model_executor.model_loader.reload"
"""Where vLLM logs what went wrong in a reload; it raises nothing."""


def disable_exit_finalizer(llm: Any) -> None:
    """At the end of the process vLLM ends its process groups, after those that they were made in have ended."""
    finalizer = vars(llm.llm_engine.engine_core).get("_finalizer")
    if finalizer is not None:
        finalizer.atexit = False


@contextlib.contextmanager
def capture_reload_warnings() -> Iterator[list[str]]:
    """Collects what vLLM warns of while weights are loaded, instead of showing it."""
    told: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    there, handler = logging.getLogger(RELOADING), Collect(logging.WARNING)
    level, propagate = there.level, there.propagate
    there.addHandler(handler)
    there.setLevel(logging.WARNING)
    there.propagate = False
    try:
        yield told
    finally:
        there.removeHandler(handler)
        there.setLevel(level)
        there.propagate = propagate


def repack_tied_head(model: Any) -> None:
    """On a CPU, an output layer that shares the embedding keeps a packed copy of the old one through a reload.

    vLLM says "ParallelLMHead: Failed to load weights" and computes with it.
    """
    head = dict(model.named_modules()).get("lm_head")
    if head is None or "cpu_linear" not in vars(head):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # pyright: ignore[reportMissingImports]

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def finish_reload(model_config: Any) -> Callable[[Any], None]:
    """Ends a reload that broke off, so that the next one begins from nothing."""

    def finish(model: Any) -> None:
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(model, model_config)

    return finish


def parameter_digests(expected: Mapping[str, Tensor], whole: bool) -> Callable[[Any], dict[str, int]]:
    """Of parameters that are as they are in a folder; `whole` if they are not split over ranks."""

    def held(model: Any) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            name = name.replace(".base_layer.", ".")  # a layer that takes an adapter has the plain one inside
            wanted = expected.get(name)
            if wanted is None or parameter.dtype != wanted.dtype or parameter.ndim != wanted.ndim:
                continue
            # A vocabulary is filled up with rows that nobody has.
            rows = parameter.data[: len(wanted)] if whole else parameter.data
            if rows.shape == wanted.shape:
                found[name] = digest(rows)
        return found

    return held


def free_kv_cache(worker: Any) -> list[int]:
    """Without sleep mode (on a CPU), keys and values give their storages back; the sizes that these had."""
    storages = _storages(worker)
    sizes = [storage.nbytes() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    return sizes


def restore_kv_cache(worker: Any, sizes: list[int]) -> None:
    """Storages of these sizes again, empty."""
    for storage, size in zip(_storages(worker), sizes, strict=True):
        storage.resize_(size)
        # What is not a number would spread from places that are masked.
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _storages(worker: Any) -> list[torch.UntypedStorage]:
    """Layers may share one."""
    caches: list[Tensor] = worker.worker.model_runner.kv_caches
    return list({cache.untyped_storage()._cdata: cache.untyped_storage() for cache in caches}.values())
