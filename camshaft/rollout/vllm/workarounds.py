"""Functions that use vLLM internals. Each of them prevents an error that vLLM does not report.

The functions are written for the versions in `installed.TESTED`. For each function, a test shows that the error occurs
without it. Functions with a `model` argument are passed to `LLM.apply_model`, functions with a `worker` argument to
`LLM.collective_rpc`.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from camshaft.digest import digest

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload"
"""Name of the logger to which vLLM reports errors of a reload instead of raising them."""


def disable_exit_finalizer(llm: Any) -> None:
    """Disable vLLM's shutdown at interpreter exit.

    The shutdown would fail, because it destroys process groups that `camshaft.device.leave_group` has already
    destroyed.
    """
    finalizer = vars(llm.llm_engine.engine_core).get("_finalizer")
    if finalizer is not None:
        finalizer.atexit = False


@contextlib.contextmanager
def capture_reload_warnings() -> Iterator[list[str]]:
    """Collect the warnings that vLLM logs during a reload of weights, instead of showing them."""
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
    """Repack the weight of an output layer that is tied to the embedding. This is necessary only on a CPU.

    During a reload, vLLM keeps a packed copy of the old weight. It logs "ParallelLMHead: Failed to load weights" and
    continues to compute with the copy.
    """
    head = dict(model.named_modules()).get("lm_head")
    if head is None or "cpu_linear" not in vars(head):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # pyright: ignore[reportMissingImports]

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def repack_experts(model: Any) -> None:
    """Pack the weights of experts for the kernels of a CPU, after a reload of all weights.

    vLLM packs them when it loads a model, but not during a reload. The kernels then read the elements of the new
    weights in the wrong order.
    """
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # pyright: ignore[reportMissingImports]
        CPUUnquantizedExperts,
    )

    for layer in model.modules():
        kernel = vars(layer.quant_method).get("moe_kernel") if "quant_method" in layer._modules else None
        if kernel is not None and isinstance(kernel.fused_experts, CPUUnquantizedExperts):
            kernel.fused_experts.process_weights_after_loading(layer)


def finish_reload(model_config: Any) -> Callable[[Any], None]:
    """Return a function that finalizes a reload, even an incomplete one, so that the next reload starts cleanly."""

    def finish(model: Any) -> None:
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(model, model_config)

    return finish


def parameter_digests(expected: Mapping[str, Tensor], unsharded: bool) -> Callable[[Any], dict[str, int]]:
    """Return a function that computes the checksums of the parameters that vLLM stores as in the checkpoint.

    `unsharded` must be True if each rank holds full parameters, and False if it holds shards.
    """

    def compute(model: Any) -> dict[str, int]:
        digests: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            name = name.replace(".base_layer.", ".")  # a LoRA layer wraps the original one
            meta = expected.get(name)
            if meta is None or parameter.dtype != meta.dtype or parameter.ndim != meta.ndim:
                continue
            # vLLM pads the vocabulary dimension with extra rows.
            rows = parameter.data[: len(meta)] if unsharded else parameter.data
            if rows.shape == meta.shape:
                digests[name] = digest(rows)
        return digests

    return compute


def free_kv_cache(worker: Any) -> list[int]:
    """Free the storages of the KV cache and return their sizes in bytes. A CPU needs this: it has no sleep mode."""
    storages = _kv_cache_storages(worker)
    sizes = [storage.nbytes() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    return sizes


def restore_kv_cache(worker: Any, sizes: list[int]) -> None:
    """Allocate the storages of the KV cache again with the given sizes in bytes, filled with zeros."""
    for storage, size in zip(_kv_cache_storages(worker), sizes, strict=True):
        storage.resize_(size)
        # NaN values in uninitialized memory would propagate from masked positions.
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _kv_cache_storages(worker: Any) -> list[torch.UntypedStorage]:
    """Return each storage of the KV cache once. Several layers may share a storage."""
    caches: list[Tensor] = worker.worker.model_runner.kv_caches
    return list({cache.untyped_storage()._cdata: cache.untyped_storage() for cache in caches}.values())
