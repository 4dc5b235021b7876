"""The `reference` engine: one process, one device, nothing sharded.

    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path="models/tiny"), optim=OptimConfig(lr=1e-3)))
    engine.init_model()

A step is in `torch_engine.py`, which all engines of the package share. To compare an engine with an implementation
that shares no code with it, see `contracts/engine/oracle.py` and `examples/plain_ppo.py`.
"""

from __future__ import annotations

from camshaft.config.backends import SINGLE_DEVICE
from camshaft.config.engine import EngineConfig
from camshaft.engine.torch_engine import TorchEngine
from camshaft.errors import EngineError
from camshaft.models.loader import load_model
from camshaft.models.packed import PackedModel


class SingleDeviceEngine(TorchEngine):
    """One model on one device."""

    capabilities = SINGLE_DEVICE

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        if config.optim is not None and config.dtype == "bfloat16":
            raise EngineError(
                "dtype=bfloat16: strategy=reference would apply updates to bfloat16 weights, which loses small updates "
                "to rounding. Train in float32, or with strategy=fsdp and its mixed_precision; a forward-only engine "
                "may use bfloat16"
            )

    def build_model(self) -> PackedModel:
        return load_model(self.config.model, self.config.dtype, str(self.device), self.config.seed)
