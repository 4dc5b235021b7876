"""Builds the model of an engine: a decoder of torchtitan, parallelized, with the weights of a model folder.

    packed = build(config, options, meshes, device, group)

As for the FSDP engines, only rank 0 reads the folder (or initializes the weights) and holds the full model in host
memory. Every rank builds and shards the model on the meta device, and receives its shards from rank 0.
"""

# pyright: reportMissingImports=false
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, distribute_tensor
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm

from camshaft.config.backends import TORCHTITAN
from camshaft.config.engine import EngineConfig
from camshaft.config.schema.torchtitan import TorchtitanOptions
from camshaft.engine.fsdp.weights import broadcast_each, load_full_model
from camshaft.engine.torchtitan.families import FAMILIES, Family, PackedDecoder
from camshaft.engine.torchtitan.mesh import SPMD_BACKEND, Meshes
from camshaft.engine.torchtitan.model import TitanModel
from camshaft.errors import EngineError
from camshaft.models.attention import config_values
from camshaft.models.loader import DTYPES, skeleton
from camshaft.models.packed import PackedModel
from camshaft.models.sequence import SequenceSplit

EMBEDDING, OUTPUT = "tok_embeddings.weight", "lm_head.weight"
"""Names of weights that a model may tie. The first and the last pipeline stage then hold a copy each."""
CHECKPOINTING = {"full": FullAC.Config, "selective": SelectiveAC.Config}


def build(
    config: EngineConfig, options: TorchtitanOptions, meshes: Meshes, device: torch.device, group: dist.ProcessGroup
) -> TitanModel:
    """Build the model of `config` and parallelize it. `group` exchanges errors."""
    template = skeleton(config.model, config.dtype)
    hf = template.hf.config
    TORCHTITAN.check_family(options, config_values(hf), config.model)
    family = FAMILIES[hf.model_type]
    layout = meshes.layout
    decoder_config = family.decoder_config(hf, config.model.head, options.enable_sequence_parallel)
    with torch.device("meta"):
        decoder = decoder_config.build().to(DTYPES[config.dtype])
    names = _weight_names(family, template, decoder)
    full_model = load_full_model(config, group)
    decoder = _parallelize(family, decoder, config, options, meshes, device)
    shared_name = None
    if decoder_config.enable_weight_tying and (decoder.tok_embeddings is None) != (decoder.lm_head is None):
        shared_name = next(name for name, titan_name in names.items() if titan_name == EMBEDDING)
        names[shared_name] = OUTPUT if decoder.tok_embeddings is None else EMBEDDING
    decoder.to_empty(device=device)
    decoder.tie_weights()
    decoder.skip_padding(hf.pad_token_id, dist.get_rank() % layout.tensor, layout.tensor)
    token_multiple = layout.tensor if options.enable_sequence_parallel else 1
    packed = TitanModel(decoder, config.model.head, hf, dict(template.weights()), names, token_multiple)
    packed.shared_name = shared_name
    _load(packed, full_model, device)
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
    family: Family,
    decoder: PackedDecoder,
    config: EngineConfig,
    options: TorchtitanOptions,
    meshes: Meshes,
    device: torch.device,
) -> PackedDecoder:
    """Apply all parallelism and activation checkpointing to a decoder on the meta device; return this rank's stage."""
    model, dtypes, stages = config.model, options.mixed_precision, meshes.layout.pipeline
    compute_dtype = dtypes.param_dtype or config.dtype
    checkpointing = CHECKPOINTING[model.gradient_checkpointing_mode]() if model.enable_gradient_checkpointing else None
    arguments = {
        "parallel_dims": meshes.dims,
        "training": TrainingConfig(
            local_batch_size=stages,
            mixed_precision_param=compute_dtype,
            mixed_precision_reduce=dtypes.reduce_dtype or compute_dtype,
        ),
        "parallelism": ParallelismConfig(
            spmd_backend=SPMD_BACKEND,
            pipeline_parallel_degree=stages,
            fsdp_reshard_after_forward="default" if options.reshard_after_forward else "never",
        ),
        "compile_config": CompileConfig(),
        "ac_config": checkpointing,
        "dump_folder": "",
    }

    def parallelize(stage: PackedDecoder, **arguments: Any) -> PackedDecoder:
        stage.untie_stages()
        family.parallelize(stage, **arguments)
        return stage

    if stages > 1:
        # The schedule is not used, because it has a fixed number of micro-batches.
        _, (decoder,), *_ = pipeline_llm(
            decoder,
            device=device,
            model_config=decoder.config,
            parallelize_fn=parallelize,
            loss_fn=torch.nn.functional.mse_loss,
            **arguments,
        )
    else:
        parallelize(decoder, **arguments)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            # Gloo does not support the reduction with a factor that FSDP would use otherwise.
            module.set_force_sum_reduction_for_comms(True)
    return decoder


@torch.no_grad()
def _load(packed: TitanModel, full_model: PackedModel | None, device: torch.device) -> None:
    """Copy the weights of rank 0's `full_model` into the shards of every rank, one weight at a time."""
    parameters = packed.weight_parameters()
    for name, full in broadcast_each(packed.template, full_model, device):
        if name in parameters:
            parameter: Any = parameters[name]
            mesh, placements = parameter.device_mesh, parameter.placements
            replicas: Any = distribute_tensor(full, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
            parameter.to_local().copy_(replicas.redistribute(placements=placements).to_local())
