"""Training engines: one interface, one file or folder per backend.

    from camshaft.engine import build_engine
    engine = build_engine("reference", EngineConfig(...))

`base.py` is the interface, `reference.py` the plain engine to read first, `contract.py` the proof that
every engine must pass, `microbatch.py` and `step.py` what all engines share. Roles import from here and
never from a backend.
"""

from camshaft.config.engine import EngineConfig
from camshaft.engine.base import BaseEngine, Output, Predictions, StepContext, StepResult
from camshaft.plugins import load

__all__ = [
    "ENGINES",
    "BaseEngine",
    "EngineConfig",
    "Output",
    "Predictions",
    "StepContext",
    "StepResult",
    "build_engine",
    "engine_class",
]

ENGINES = {
    "reference": "camshaft.engine.single:SingleDeviceEngine",
    "fsdp": "camshaft.engine.fsdp:FSDPEngine",
    "fsdp2": "camshaft.engine.fsdp:FSDPEngine",
    "fsdp1": "camshaft.engine.fsdp:FSDP1Engine",
}


def engine_class(strategy: str) -> type[BaseEngine]:
    """The class called `strategy`: a name above, an entry point, or `package.module:Class`."""
    return load(strategy, ENGINES, "camshaft.engines", BaseEngine)


def build_engine(strategy: str, config: EngineConfig) -> BaseEngine:
    """An engine of the class called `strategy`; its model is built by `init_model`."""
    return engine_class(strategy)(config)
