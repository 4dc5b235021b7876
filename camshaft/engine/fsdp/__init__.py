"""The sharded engine on PyTorch's FSDP.

engine.py            `FSDPEngine`, on `fully_shard` (`fsdp`)
fsdp1.py             `FSDP1Engine`, on `FullyShardedDataParallel` (`fsdp1`)
mesh.py              layout of the ranks: copies x shards x tensor, data x sequence x tensor
parallelize.py       FSDP units and their dtypes
tensor_parallel.py   sharding of matrices
weights.py           loading of weights into shards, gathering of shards
"""

from camshaft.engine.fsdp.engine import FSDPEngine
from camshaft.engine.fsdp.fsdp1 import FSDP1Engine

__all__ = ["FSDP1Engine", "FSDPEngine"]
