"""Builds the model of an engine: a decoder of torchtitan, parallelized, with the weights of a model folder.

    packed = build(config, options, meshes, device, group)

As for the FSDP engines, only rank 0 reads the folder (or initializes the weights) and holds the full model in host
memory. Every rank builds and shards the model on the meta device, and receives its shards from rank 0.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from camshaft.config.engine import EngineConfig
from camshaft.config.schema.torchtitan import TorchtitanOptions
from camshaft.engine.fsdp.weights import load_full_model
from camshaft.engine.torchtitan.families import Family, PackedDecoder, check_tensor_parallel, family_of
from camshaft.engine.torchtitan.mesh import SPMD_BACKEND, Meshes
from camshaft.engine.torchtitan.model import TitanModel
from camshaft.errors import EngineError
from camshaft.models.loader import DTYPES, skeleton
from camshaft.models.packed import PackedModel
from camshaft.models.sequence import SequenceSplit, check_heads

CHECKPOINTING = {"full": FullAC.Config, "selective": SelectiveAC.Config}


def build(
    config: EngineConfig, options: TorchtitanOptions, meshes: Meshes, device: torch.device, group: dist.ProcessGroup
) -> TitanModel:
    """Build the model of `config` and parallelize it. `group` exchanges errors."""
    template = skeleton(config.model, config.dtype)
    hf = template.hf.config
    family = family_of(hf)
    check_tensor_parallel(hf, meshes.layout.tensor)
    check_heads(hf, meshes.layout.sequence)
    decoder_config = family.decoder_config(hf, config.model.head, options.enable_sequence_parallel)
    with torch.device("meta"):
        decoder = decoder_config.build().to(DTYPES[config.dtype])
    names = _weight_names(family, template, decoder)
    full_model = load_full_model(config, group)
    _parallelize(family, decoder, config, options, meshes)
    decoder.to_empty(device=device)
    decoder.tie_weights()
    tensor = meshes.layout.tensor
    decoder.skip_padding(hf.pad_token_id, dist.get_rank() % tensor, tensor)
    _load(decoder, full_model, names)
    token_multiple = tensor if options.enable_sequence_parallel else 1
    packed = TitanModel(decoder, config.model.head, hf, names, token_multiple)
    if meshes.sequence is not None:
        packed.sequence = SequenceSplit(meshes.sequence, device)
    return packed.eval()


def _weight_names(family: Family, template: PackedModel, decoder: PackedDecoder) -> dict[str, str]:
    """Map the names of all weights in transformers to their names in `decoder`."""
    parameters = dict(decoder.named_parameters())
    names = {}
    for name, weight in template.weights():
        titan_name = family.titan_name(name, decoder.config)
        if titan_name is None or titan_name not in parameters or parameters[titan_name].shape != weight.shape:
            raise EngineError(
                f"strategy=torchtitan has no weight for {name} of shape {tuple(weight.shape)} in "
                f"{type(template.hf).__name__}; choose another model, or strategy=fsdp"
            )
        names[name] = titan_name
    unused = parameters.keys() - names.values()
    if unused:
        raise EngineError(
            f"{type(template.hf).__name__} has no weight for {min(unused)} of torchtitan; choose another model, or "
            "strategy=fsdp"
        )
    return names


def _parallelize(
    family: Family, decoder: PackedDecoder, config: EngineConfig, options: TorchtitanOptions, meshes: Meshes
) -> None:
    """Apply tensor parallelism, activation checkpointing and FSDP to a decoder on the meta device."""
    model, dtypes = config.model, options.mixed_precision
    compute_dtype = dtypes.param_dtype or config.dtype
    checkpointing = CHECKPOINTING[model.gradient_checkpointing_mode]() if model.enable_gradient_checkpointing else None
    family.parallelize(
        decoder,
        parallel_dims=meshes.dims,
        training=TrainingConfig(
            mixed_precision_param=compute_dtype, mixed_precision_reduce=dtypes.reduce_dtype or compute_dtype
        ),
        parallelism=ParallelismConfig(
            spmd_backend=SPMD_BACKEND,
            fsdp_reshard_after_forward="default" if options.reshard_after_forward else "never",
        ),
        compile_config=CompileConfig(),
        ac_config=checkpointing,
        dump_folder="",
    )
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            # Gloo does not support the reduction with a factor that FSDP would use otherwise.
            module.set_force_sum_reduction_for_comms(True)


def _load(decoder: PackedDecoder, full_model: PackedModel | None, names: dict[str, str]) -> None:
    """Copy the weights of rank 0's `full_model` into the sharded decoder of every rank."""
    state: dict[str, Any] = {}
    if full_model is not None:
        state = {names[name]: weight for name, weight in full_model.weights()}
        if decoder.enable_weight_tying:
            state["lm_head.weight"] = state["tok_embeddings.weight"]
    set_model_state_dict(decoder, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
