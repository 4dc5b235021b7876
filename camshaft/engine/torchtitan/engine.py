"""The `torchtitan` engine: trains model definitions of torchtitan with its parallelism, on gloo or NCCL.

    engine = TorchtitanEngine(EngineConfig(model=..., optim=..., options={"tensor_parallel_size": 2}))

`options` are described by `TorchtitanOptions` in `config/schema/torchtitan.py`. torchtitan defines the model, its
tensor parallelism, FSDP units and activation checkpointing. Optimizer, checkpoints, micro-batches and losses are those
of the other engines (`ShardedEngine`).
"""

from collections.abc import Iterator
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from camshaft.config.backends import TORCHTITAN
from camshaft.config.schema.torchtitan import TorchtitanOptions
from camshaft.device import seed_ranks
from camshaft.engine.base import DtypeOf, cast_weight
from camshaft.engine.micro_batches import MicroBatches
from camshaft.engine.optim import clip_and_step, gradient_norm
from camshaft.engine.pipeline import locate_weights, weights_of_all_stages
from camshaft.engine.sharded import ShardedEngine
from camshaft.engine.torchtitan import weights
from camshaft.engine.torchtitan.mesh import Meshes, layout_of
from camshaft.engine.torchtitan.model import TitanModel
from camshaft.engine.torchtitan.pipeline import run_pipeline
from camshaft.seat import Seat


class TorchtitanEngine(ShardedEngine):
    """One model of torchtitan on the ranks of the default process group."""

    capabilities = TORCHTITAN
    copies_weights = True
    options: TorchtitanOptions
    module: TitanModel  # pyright: ignore[reportIncompatibleVariableOverride]

    def build_model(self) -> TitanModel:
        group = self.join_ranks()
        self.meshes = Meshes.create(layout_of(self.options, dist.get_world_size()), self.device)
        self.data_group = self.meshes.data
        module = weights.build(self.config, self.options, self.meshes, self.device, group)
        if self.meshes.pipeline is not None:
            self._stage_of = locate_weights(module.template, module.weight_parameters(), self.meshes.pipeline)
        # Tensor-parallel ranks need equal dropout masks. All other ranks process different rows or tokens.
        seed_ranks(self.device, self.config.seed, dist.get_rank() // self.meshes.layout.tensor)
        return module

    def after_inference(self) -> None:
        # The output layer runs after the decoder's forward pass, so its FSDP unit stays in the state of a forward pass.
        # In this state, `reshard` has an effect only on units that reshard after a forward pass.
        head = self.module.decoder.lm_head
        if isinstance(head, FSDPModule):
            head.set_reshard_after_forward(True, recurse=False)
        super().after_inference()
        if isinstance(head, FSDPModule):
            head.set_reshard_after_forward(False, recurse=False)

    @property
    def seat(self) -> Seat:
        self.require_model()
        return self.meshes.layout.seat(dist.get_rank())

    # -- pipeline stages --------------------------------------------------------------------------

    def run_micro_batches(self, micro_batches: MicroBatches) -> None:
        if self.meshes.pipeline is None:
            super().run_micro_batches(micro_batches)
        else:
            run_pipeline(self.module, micro_batches, self.meshes, self.compute_dtype, self.forward_context)

    def clip_and_step(self) -> tuple[float, bool]:
        pipeline = self.meshes.pipeline
        if pipeline is None:
            return super().clip_and_step()
        shared_name = self.module.shared_name
        shared = self.module.weight_parameters()[shared_name] if shared_name is not None else None
        if shared is not None and shared.grad is not None:
            dist.all_reduce(cast(DTensor, shared.grad).to_local(), group=self.meshes.end_stages)
        is_first = self.module.decoder.tok_embeddings is not None

        def total_norm(gradients: list[Tensor]) -> Tensor:
            if shared is not None and not is_first:  # a weight that two stages share counts once
                gradients = [gradient for gradient in gradients if gradient is not shared.grad]
            square = gradient_norm(gradients).square()
            dist.all_reduce(square, group=pipeline)
            return square.sqrt()

        return clip_and_step(self.optimizer, self.grad_clip, total_norm)

    def named_weights(
        self, adapter_only: bool = False, dtype_of: DtypeOf | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self.require_model()
        pipeline = self.meshes.pipeline
        if pipeline is None or adapter_only:
            return super().named_weights(adapter_only, dtype_of)
        weights = dict(self.module.weights())

        def full_weight(name: str) -> Tensor:
            return self.full_tensor(cast_weight(name, weights[name], dtype_of))

        templates = self.module.template
        return weights_of_all_stages(self._stage_of, full_weight, templates, dtype_of, pipeline, self.device)
