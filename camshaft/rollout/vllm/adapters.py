"""Sync a LoRA adapter to vLLM's LoRA layers, separately from the base weights.

    vllm.LLM(**engine_arguments(config), **adapter_arguments(config))
    with peft_folder(weights, config) as folder:
        llm.llm_engine.add_lora(LoRARequest("1", 1, folder))
    llm.apply_model(adapter_digests(expected, 1))        # checksums by name, of the buffers that the kernels read

vLLM loads an adapter from a folder in PEFT's layout. This module writes the folder to memory and deletes it after vLLM
has read it. The sender has already multiplied B by the scaling, and the folder sets alpha = rank. vLLM then leaves the
values unchanged, so the checksums on both sides can be compared. This module relies on vLLM internals.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.digest import digest
from camshaft.errors import RolloutError
from camshaft.models.lora import save_adapter
from camshaft.rollout.weights.checks import ExpectedWeights
from camshaft.temporary import SHARED_MEMORY, temporary_folder

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM supports. vLLM pads an adapter with another rank to the next one with zeros."""


def adapter_arguments(config: RolloutEngineConfig) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that enable a single adapter on exactly the layers that it adapts."""
    if config.lora is None:
        return {}
    rank = next((size for size in RANKS if size >= config.lora.rank), None)
    if rank is None:
        raise RolloutError(
            f"vLLM supports adapters up to rank {RANKS[-1]}, got {config.lora.rank}; set "
            f"actor_rollout_ref.model.lora_rank={RANKS[-1]}, or actor_rollout_ref.rollout.lora_weights=merged"
        )
    if torch.device(config.device).type != "cpu" and config.dtype != "bfloat16":
        raise RolloutError(
            f"rollout.dtype={config.dtype} is unsupported with adapters, because vLLM computes adapters in half "
            f"precision on {config.device}; set actor_rollout_ref.rollout.dtype=bfloat16, or "
            "actor_rollout_ref.rollout.lora_weights=merged"
        )
    layers = {name.rpartition(".lora_")[0] for name in ExpectedWeights.adapter_from_config(config, config.lora).weights}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": rank,
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }


@contextlib.contextmanager
def peft_folder(weights: Iterable[tuple[str, Tensor]], config: RolloutEngineConfig) -> Iterator[str]:
    """Write the adapter to a temporary folder in PEFT's layout with a scaling of 1, and delete the folder on exit."""
    assert config.lora is not None
    unscaled = config.lora.model_copy(update={"alpha": float(config.lora.rank)})
    with temporary_folder(SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
        save_adapter(weights, folder, unscaled, config.model_path)
        yield str(folder)


def adapter_digests(expected: Mapping[str, Tensor], number: int) -> Callable[[Any], dict[str, int]]:
    """Return a function for `LLM.apply_model` that computes the checksums of adapter `number` from vLLM's buffers.

    If a nonzero buffer does not belong to a tensor in `expected`, its checksum is keyed by vLLM's name of the layer.
    """

    def compute(model: Any) -> dict[str, int]:
        from vllm.lora.utils import parse_fine_tuned_lora_name  # pyright: ignore[reportMissingImports]

        manager = model.lora_manager
        if number not in manager.lora_index_to_id:
            return {}
        name_mapper = getattr(model, "hf_to_vllm_mapper", None)
        rename = None if name_mapper is None else name_mapper.get_rename_mapper()
        buffer_digests = _digests_by_layer(manager, number)
        digests: dict[str, int] = {}
        for name in expected:
            value = buffer_digests.pop(parse_fine_tuned_lora_name(name, rename), None)
            if value is not None:
                digests[name] = value
        for (layer, is_a), value in buffer_digests.items():
            if value is not None:
                digests[f"{layer}.lora_{'A' if is_a else 'B'}.weight"] = value
        return digests

    return compute


def _digests_by_layer(manager: Any, number: int) -> dict[tuple[str, bool], int | None]:
    """Map (unfused layer, True for A or False for B) to a checksum.

    The checksum is None if nothing is loaded for the layer and its buffer is zero.
    """
    slot, adapter = manager.lora_index_to_id.index(number), manager.list_adapters()[number]
    digests: dict[tuple[str, bool], int | None] = {}
    for name, layer in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        if len(parts) != len(layer.lora_a_stacked):
            raise RolloutError(
                f"vLLM splits layer {name} into {len(layer.lora_a_stacked)} sublayers but its adapter into "
                f"{len(parts)}, so the weight sync cannot be verified; set "
                "actor_rollout_ref.rollout.lora_weights=merged, or exclude the layer with "
                "actor_rollout_ref.model.exclude_modules"
            )
        weights = adapter.loras.get(name)
        for is_a, buffers in ((True, layer.lora_a_stacked), (False, layer.lora_b_stacked)):
            tensors = [None] * len(parts)
            if weights is not None:
                values = weights.lora_a if is_a else weights.lora_b
                tensors = values if isinstance(values, list) else [values]
            shards = tensors
            if weights is not None and layer.tp_size > 1:
                slice_lora = layer.slice_lora_a if is_a else layer.slice_lora_b
                slices = slice_lora(tensors if len(parts) > 1 else tensors[0])
                shards = slices if isinstance(slices, list) else [slices]
            for part, tensor, shard, buffer in zip(parts, tensors, shards, buffers, strict=True):
                digests[part, is_a] = _buffer_digest(buffer[slot, 0], tensor, shard)
    return digests


def _buffer_digest(buffer: Tensor, tensor: Tensor | None, shard: Tensor | None) -> int | None:
    """Return the checksum of `tensor` if `buffer` holds this rank's shard of it and zeros elsewhere.

    Otherwise return the checksum of the buffer's content, which differs. Return None if there is no tensor and the
    buffer is zero.
    """
    if tensor is None or shard is None:
        return digest(buffer) if bool(buffer.any()) else None
    region = buffer[: shard.shape[0], : shard.shape[1]]
    if not torch.equal(region, shard.to(region.device)):
        return digest(region)
    return digest(tensor) if buffer.count_nonzero() == shard.count_nonzero().to(buffer.device) else digest(buffer)
