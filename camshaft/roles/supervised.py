"""Base class of the roles in `sft.py` and `rm.py`, which run one optimizer step per batch.

The loss is a mean over the whole batch and does not depend on the number of micro-batches or ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from camshaft.config import EngineConfig, SupervisedConfig
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.engine import StepResult, build_engine
from camshaft.roles.base import TrainedRole


class SupervisedWorker(TrainedRole, ABC):
    """A model and its optimizer, trained with one optimizer step per batch."""

    def __init__(self, config: SupervisedConfig, engine: EngineConfig):
        super().__init__()
        self.engine = build_engine(config.strategy, engine)
        self.compute_dtype = config.fsdp_config.compute_dtype()

    @abstractmethod
    def optimizer_step(self, data: DataProto) -> StepResult:
        """Run one optimizer step."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def train_batch(self, data: DataProto) -> DataProto:
        """Run one optimizer step and return its metrics in `meta_info["metrics"]`."""
        rate = self.engine.learning_rate
        with self.engine.train_mode():
            result = self.optimizer_step(data)
        self.engine.lr_scheduler_step()
        metrics = {
            "loss": result.loss,
            **result.metrics,
            "grad_norm": result.grad_norm,
            "lr": rate,
            "skipped_steps": float(result.skipped),
        }
        return DataProto({}, {"metrics": {f"train/{name}": value for name, value in metrics.items()}})
