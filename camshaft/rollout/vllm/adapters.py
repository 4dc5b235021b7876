"""An adapter beside the base weights, in vLLM's own LoRA layers: how it gets there, and what is there then.

    vllm.LLM(**engine_arguments(config), **adapter_arguments(config))
    with peft_folder(weights, config) as folder:
        llm.llm_engine.add_lora(LoRARequest("1", 1, folder))
    llm.apply_model(adapter_digests(expected, 1))        # by name, of what the kernels read

It goes in through vLLM's public door, a folder in PEFT's layout, which is in memory and gone as soon as it is read.
The scaling is in B already and the folder says alpha = rank, so that vLLM, which multiplies its scaling into B, leaves
the numbers as they are: a digest at one end is that at the other. Looking at what is there is not public (`inside.py`).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.digest import digest
from camshaft.errors import RolloutError
from camshaft.models.lora import save_adapter
from camshaft.rollout.weights.checks import ExpectedWeights

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vLLM's buffers; a smaller adapter is filled up with zeros."""
MEMORY = Path("/dev/shm")
"""Files here are in memory."""


def adapter_arguments(config: RolloutEngineConfig) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one adapter at a time, on the layers that it has and on no other."""
    if config.lora is None:
        return {}
    rank = next((size for size in RANKS if size >= config.lora.rank), None)
    if rank is None:
        raise RolloutError(
            f"vLLM takes adapters up to rank {RANKS[-1]}, got {config.lora.rank}; set actor_rollout_ref.model.lora_rank"
            f"={RANKS[-1]}, or actor_rollout_ref.rollout.lora_weights=merged"
        )
    if torch.device(config.device).type != "cpu" and config.dtype != "bfloat16":
        raise RolloutError(
            f"vLLM computes adapters in half precision on {config.device}, and rollout.dtype={config.dtype}; set "
            "actor_rollout_ref.rollout.dtype=bfloat16, or actor_rollout_ref.rollout.lora_weights=merged"
        )
    layers = {name.rpartition(".lora_")[0] for name in ExpectedWeights.adapter_of_folder(config, config.lora).weights}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": rank,
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }


@contextlib.contextmanager
def peft_folder(weights: Iterable[tuple[str, Tensor]], config: RolloutEngineConfig) -> Iterator[str]:
    """A folder that says: these weights, scaled by 1. It is there inside the context."""
    assert config.lora is not None
    unscaled = config.lora.model_copy(update={"alpha": float(config.lora.rank)})
    with tempfile.TemporaryDirectory(prefix="camshaft-adapter-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        save_adapter(weights, folder, unscaled, config.model_path)
        yield folder


def adapter_digests(expected: Mapping[str, Tensor], number: int) -> Callable[[Any], dict[str, int]]:
    """Of adapter `number`, tensor by tensor, where vLLM computes with it; for `LLM.apply_model`.

    What vLLM has that is not `expected`, and is not zero, has its digest under vLLM's name of the layer.
    """

    def held(model: Any) -> dict[str, int]:
        from vllm.lora.utils import parse_fine_tuned_lora_name  # pyright: ignore[reportMissingImports]

        manager = model.lora_manager
        if number not in manager.lora_index_to_id:
            return {}
        renamed = getattr(model, "hf_to_vllm_mapper", None)
        mapper = None if renamed is None else renamed.get_rename_mapper()
        there = _digests_by_place(manager, number)
        found: dict[str, int] = {}
        for name in expected:
            value = there.pop(parse_fine_tuned_lora_name(name, mapper), None)
            if value is not None:
                found[name] = value
        extra = {(layer, is_a): value for (layer, is_a), value in there.items() if value is not None}
        return found | {f"{layer}.lora_{'A' if is_a else 'B'}.weight": value for (layer, is_a), value in extra.items()}

    return held


def _digests_by_place(manager: Any, number: int) -> dict[tuple[str, bool], int | None]:
    """(layer as transformers splits it, whether it is A) -> digest; None where all is zero and nothing was loaded."""
    slot, loaded = manager.lora_index_to_id.index(number), manager.list_adapters()[number]
    found: dict[tuple[str, bool], int | None] = {}
    for name, layer in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        if len(parts) != len(layer.lora_a_stacked):
            raise RolloutError(
                f"vLLM cuts {name} into {len(layer.lora_a_stacked)} parts, and the adapter into {len(parts)}, so "
                "nothing proves what arrives there; set actor_rollout_ref.rollout.lora_weights=merged, or leave the "
                "layer out with actor_rollout_ref.model.exclude_modules"
            )
        weights = loaded.loras.get(name)
        for is_a, buffers in ((True, layer.lora_a_stacked), (False, layer.lora_b_stacked)):
            whole = [None] * len(parts)
            if weights is not None:
                values = weights.lora_a if is_a else weights.lora_b
                whole = values if isinstance(values, list) else [values]
            shares = whole
            if weights is not None and layer.tp_size > 1:
                cut = (layer.slice_lora_a if is_a else layer.slice_lora_b)(whole if len(parts) > 1 else whole[0])
                shares = cut if isinstance(cut, list) else [cut]
            for part, tensor, share, buffer in zip(parts, whole, shares, buffers, strict=True):
                found[part, is_a] = _digest_in(buffer[slot, 0], tensor, share)
    return found


def _digest_in(buffer: Tensor, whole: Tensor | None, share: Tensor | None) -> int | None:
    """Of `whole`, which was loaded, if `buffer` holds this rank's share of it and else zeros; another one if not."""
    if whole is None or share is None:
        return digest(buffer) if bool(buffer.any()) else None
    region = buffer[: share.shape[0], : share.shape[1]]
    if not torch.equal(region, share.to(region.device)):
        return digest(region)
    return digest(whole) if buffer.count_nonzero() == share.count_nonzero().to(buffer.device) else digest(buffer)
