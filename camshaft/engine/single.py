"""The reference engine: plain torch, one process, nothing sharded. The oracle for the others.

    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path="models/tiny"), optim=OptimConfig(lr=1e-3)))
    engine.init_model()

What it does in a step is `packed_engine.py`, the part that all engines here share, and the one to read first;
here is the simplest layout there is.
"""

from __future__ import annotations

from camshaft.config.backends import SINGLE_DEVICE
from camshaft.config.engine import EngineConfig
from camshaft.dataproto import DataProto
from camshaft.engine.torch_engine import TorchEngine
from camshaft.errors import EngineError
from camshaft.models.loader import load_model
from camshaft.models.packed import PackedModel
from camshaft.seat import Seat


class SingleDeviceEngine(TorchEngine):
    """One model on one device."""

    capabilities = SINGLE_DEVICE

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        if config.optim is not None and config.dtype == "bfloat16":
            raise EngineError(
                "dtype=bfloat16: this engine would update the bfloat16 weights themselves, and small updates are lost "
                "to rounding. Train in float32, or with the fsdp engine and its mixed_precision; a forward-only "
                "engine may be bfloat16"
            )

    def _build(self) -> PackedModel:
        return load_model(self.config.model, self.config.dtype, str(self._device), self.config.seed)

    @property
    def seat(self) -> Seat:
        return Seat()

    def shard_data(self, data: DataProto) -> DataProto:
        return data

    def unshard_data(self, data: DataProto) -> DataProto:
        return data
