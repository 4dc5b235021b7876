"""Engines that shard a model over ranks with PyTorch's FSDP.

engine.py            `FSDPEngine`, based on `fully_shard` (strategy `fsdp`)
fsdp1.py             `FSDP1Engine`, based on `FullyShardedDataParallel` (strategy `fsdp1`)
mesh.py              device meshes: replicas x shards x tensor for weights, data x sequence x tensor for tokens
parallelize.py       chooses the FSDP units and applies `fully_shard` to them
tensor_parallel.py   shards the matrices of each layer
weights.py           loads weights into shards
"""

from camshaft.engine.fsdp.engine import FSDPEngine
from camshaft.engine.fsdp.fsdp1 import FSDP1Engine

__all__ = ["FSDP1Engine", "FSDPEngine"]
