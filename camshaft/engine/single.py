"""The `reference` engine: trains one model in one process on one device.

    engine = SingleDeviceEngine(EngineConfig(model=EngineModel(path="models/tiny"), optim=OptimConfig(lr=1e-3)))
    engine.init_model()

The training step is inherited from `TorchEngine` in `torch_engine.py`. `contracts/engine/oracle.py` and
`examples/plain_ppo.py` are independent implementations to compare it with; they share no code with the engines.

With `mixed_precision.param_dtype` in the options, a step computes with casts of the weights. The weights themselves
keep their dtype, so optimizer, checkpoints and weight sync do not depend on the option.
"""

from camshaft.config.backends import SINGLE_DEVICE
from camshaft.engine.torch_engine import TorchEngine
from camshaft.models.loader import load_model
from camshaft.models.packed import PackedModel


class SingleDeviceEngine(TorchEngine):
    """One model on one device."""

    capabilities = SINGLE_DEVICE
    casts_parameters = True

    def build_model(self) -> PackedModel:
        return load_model(self.config.model, self.config.dtype, str(self.device), self.config.seed)
