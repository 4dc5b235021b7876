"""The `reference` engine: trains one model in one process on one device.

    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path="models/tiny"), optim=OptimConfig(lr=1e-3)))
    engine.init_model()

The training step is inherited from `TorchEngine` in `torch_engine.py`. `contracts/engine/oracle.py` and
`examples/plain_ppo.py` are independent implementations to compare it with; they share no code with the engines.
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
                "dtype=bfloat16 is not supported for training with strategy=reference, because bfloat16 weights lose "
                "small updates to rounding; set dtype=float32, or strategy=fsdp with mixed_precision (a forward-only "
                "engine may use bfloat16)"
            )

    def build_model(self) -> PackedModel:
        return load_model(self.config.model, self.config.dtype, str(self.device), self.config.seed)
