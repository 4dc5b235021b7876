"""The `fsdp` engine: shards one model over all ranks with PyTorch's `fully_shard`, on gloo or NCCL.

    engine = FSDPEngine(EngineConfig(model=..., optim=..., device="cuda", options={"fsdp_size": 8}))

`options` are described by `FSDPOptions` in `config/schema/fsdp.py`. `TorchEngine` in `engine/torch_engine.py`
implements the training step (micro-batches, counts, losses), and `ShardedEngine` in `engine/sharded.py` contains the
code that all sharded engines share.
"""

import torch
import torch.distributed as dist

from camshaft.config.backends import FSDP
from camshaft.config.schema.fsdp import FSDPOptions
from camshaft.device import available_device, seed_ranks
from camshaft.engine.fsdp import parallelize
from camshaft.engine.fsdp.mesh import Layout, create_meshes
from camshaft.engine.fsdp.tensor_parallel import apply_tensor_parallel
from camshaft.engine.fsdp.weights import allocate, broadcast_weights, load_full_model
from camshaft.engine.offload import HOST
from camshaft.engine.sharded import ShardedEngine
from camshaft.models.packed import PackedModel
from camshaft.models.sequence import SequenceSplit, check_heads
from camshaft.seat import Seat


class FSDPEngine(ShardedEngine):
    """One model, sharded over the ranks of the default process group."""

    capabilities = FSDP
    options: FSDPOptions

    def build_model(self) -> PackedModel:
        group = self.join_ranks()
        layout = Layout.from_options(self.options, dist.get_world_size())
        self.meshes = create_meshes(dist.group.WORLD, layout, self.device.type)
        self.data_group = self.meshes.data
        module = self._build_sharded(group)
        # Tensor-parallel ranks need equal dropout masks. All other ranks process different rows or tokens.
        seed_ranks(self.device, self.config.seed, dist.get_rank() // self.meshes.layout.tensor)
        return module

    def _build_sharded(self, group: dist.ProcessGroup) -> PackedModel:
        """Build the sharded model with its weights; `group` exchanges errors."""
        full_model = load_full_model(self.config, group)
        packed = allocate(self.config, self.home_device, self._parallelize)
        broadcast_weights(packed, full_model, self.device)
        return packed.eval()

    def _parallelize(self, packed: PackedModel) -> None:
        """Apply tensor parallelism, then FSDP, then sequence parallelism to a model on the meta device."""
        meshes = self.meshes
        if meshes.tensor is not None:
            apply_tensor_parallel(packed, meshes.tensor)
        param_dtype = None if self.weight_dtypes == {self.compute_dtype} else self.compute_dtype
        parallelize.shard(packed, meshes.weights, self.options, self.device, param_dtype)
        self._split_sequences(packed)

    def _split_sequences(self, packed: PackedModel) -> None:
        """Apply sequence parallelism."""
        if self.meshes.sequence is not None:
            check_heads(packed.hf.config, self.meshes.layout.sequence)
            packed.sequence = SequenceSplit(self.meshes.sequence, self.device)

    @property
    def seat(self) -> Seat:
        self.require_model()
        return self.meshes.layout.seat(dist.get_rank())

    @property
    def home_device(self) -> torch.device:
        # With the offload policy, FSDP copies each unit to the device for its computation and keeps it in host memory.
        return HOST if self.options.offload_policy else self.device

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        self.require_model()
        if self.options.offload_policy:  # all parts stay in host memory
            available_device(device)
        else:
            super().to(device, model, optimizer)
