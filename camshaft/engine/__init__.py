"""Training engines behind one interface.

    from camshaft.engine import build_engine
    engine = build_engine("reference", EngineConfig(...))

    from camshaft.engine import PackedModel, Seat, TorchEngine, load_model      # to write an engine

    base.py             the interface; roles import from this package, never from a backend
    context.py          what a caller requests of a step, and what the step returns beside predictions
    torch_engine.py     base class of the built-in engines: a packed model and a torch optimizer
    single.py           `TorchEngine` on one device (`reference`)
    sharded.py          base class of engines that shard a model over ranks
    fsdp/               `ShardedEngine` with PyTorch's FSDP (`fsdp`, `fsdp1`)
    megatron/           GPT models of megatron-core, with tensor, pipeline and expert parallelism (`megatron`)
    torchtitan/         `ShardedEngine` with model definitions of torchtitan (`torchtitan`)
    pipeline.py         losses, outputs and weights of pipeline stages
    micro_batches.py    splits a mini-batch into micro-batches
    prefix_sharing.py   computes a common prompt once for all of its responses
    routing.py          auxiliary loss and metrics of the routers of a mixture of experts
    optim.py            optimizer, learning-rate schedule, gradient clipping
    offload.py          moves parameters, gradients and optimizer state to host memory between phases
    checkpoint.py       saves checkpoints, and loads them at any world size
    collectives.py      broadcasts and gathers Python results and errors

`contracts/engine` tests every engine against the same rules.
"""

from camshaft.config import backends
from camshaft.config.backends import targets
from camshaft.config.engine import EngineCapabilities, EngineConfig, EngineModel, EngineOptions, OptimConfig
from camshaft.device import seed_ranks
from camshaft.engine.base import BaseEngine, Predictions, StepHyperparameters, StepResult
from camshaft.engine.base import DtypeOf as DtypeOf
from camshaft.engine.collectives import Group, on_every_rank, on_rank_zero
from camshaft.engine.context import RoutingMode, StepContext
from camshaft.engine.torch_engine import TorchEngine
from camshaft.models.heads import Output
from camshaft.models.loader import load_model
from camshaft.models.packed import PackedModel
from camshaft.plugins import load
from camshaft.seat import Seat

__all__ = [
    "ENGINES", "BaseEngine", "EngineCapabilities", "EngineConfig", "EngineModel", "EngineOptions", "Group",
    "OptimConfig", "Output", "PackedModel", "Predictions", "RoutingMode", "Seat", "StepContext", "StepHyperparameters",
    "StepResult", "TorchEngine", "build_engine", "engine_class", "load_model", "on_every_rank", "on_rank_zero",
    "seed_ranks",
]  # fmt: skip

ENGINES = targets(backends.ENGINES)
"""Built-in names and their classes; the registry is `camshaft/config/backends.py`."""


def engine_class(strategy: str) -> type[BaseEngine]:
    """Resolve an engine class from a name in `ENGINES`, an entry point, or an import path `package.module:Class`."""
    return load(strategy, ENGINES, "camshaft.engines", BaseEngine)


def build_engine(strategy: str, config: EngineConfig) -> BaseEngine:
    """Construct an engine from the name of its strategy. Call its `init_model` to build the model."""
    return engine_class(strategy)(config)
