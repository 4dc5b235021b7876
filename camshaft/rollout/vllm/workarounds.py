"""Code that relies on vLLM internals; each function prevents an error that vLLM does not report.

The functions are written against the versions in `installed.TESTED`, and tests show each error with its function
removed. Functions of a model are for `LLM.apply_model`, functions of a worker for `LLM.collective_rpc`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from camshaft.digest import digest

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload"
"""Logger that reports errors of a reload, which vLLM does not raise."""


def disable_exit_finalizer(llm: Any) -> None:
    """Skip vLLM's shutdown at interpreter exit.

    It would destroy process groups after `camshaft.device.leave_group` has destroyed all of them, and fail.
    """
    finalizer = vars(llm.llm_engine.engine_core).get("_finalizer")
    if finalizer is not None:
        finalizer.atexit = False


@contextlib.contextmanager
def capture_reload_warnings() -> Iterator[list[str]]:
    """Collect the warnings that vLLM logs while it reloads weights, instead of showing them."""
    messages: list[str] = []

    class CollectHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger(RELOAD_LOGGER), CollectHandler(logging.WARNING)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def repack_tied_head(model: Any) -> None:
    """Repack an output layer that is tied to the embedding, on a CPU.

    vLLM keeps a packed copy of the old weight through a reload: it logs "ParallelLMHead: Failed to load weights" and
    computes with the copy.
    """
    head = dict(model.named_modules()).get("lm_head")
    if head is None or "cpu_linear" not in vars(head):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # pyright: ignore[reportMissingImports]

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def finish_reload(model_config: Any) -> Callable[[Any], None]:
    """Return a function that finalizes a reload, complete or not, so that the next one starts from a clean state."""

    def finish(model: Any) -> None:
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(model, model_config)

    return finish


def parameter_digests(expected: Mapping[str, Tensor], unsharded: bool) -> Callable[[Any], dict[str, int]]:
    """Return a function that computes checksums of the parameters that vLLM stores as in the checkpoint.

    `unsharded` is True if each rank holds full parameters.
    """

    def compute(model: Any) -> dict[str, int]:
        digests: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            name = name.replace(".base_layer.", ".")  # a LoRA layer wraps the original one
            meta = expected.get(name)
            if meta is None or parameter.dtype != meta.dtype or parameter.ndim != meta.ndim:
                continue
            # vLLM pads the vocabulary with extra rows.
            rows = parameter.data[: len(meta)] if unsharded else parameter.data
            if rows.shape == meta.shape:
                digests[name] = digest(rows)
        return digests

    return compute


def free_kv_cache(worker: Any) -> list[int]:
    """Free the storages of the KV cache without sleep mode (on a CPU), and return their sizes in bytes."""
    storages = _kv_cache_storages(worker)
    sizes = [storage.nbytes() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    return sizes


def restore_kv_cache(worker: Any, sizes: list[int]) -> None:
    """Allocate the storages of the KV cache again with these sizes, filled with zeros."""
    for storage, size in zip(_kv_cache_storages(worker), sizes, strict=True):
        storage.resize_(size)
        # NaN in uninitialized memory would spread from masked positions.
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _kv_cache_storages(worker: Any) -> list[torch.UntypedStorage]:
    """Return each storage once; layers may share one."""
    caches: list[Tensor] = worker.worker.model_runner.kv_caches
    return list({cache.untyped_storage()._cdata: cache.untyped_storage() for cache in caches}.values())
