"""What `sft.py` and `rm.py` share: a model that takes one optimizer step a batch.

The mean of the loss is taken over the whole batch, however it is cut and over however many ranks it is split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from camshaft.config import EngineConfig, SupervisedConfig
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.engine import StepResult, build_engine
from camshaft.roles.base import TrainedRole


class SupervisedWorker(TrainedRole, ABC):
    """A model and its optimizer."""

    def __init__(self, config: SupervisedConfig, engine: EngineConfig):
        super().__init__()
        self.engine = build_engine(config.strategy, engine)
        self.computes_in = config.fsdp_config.computes_in()

    @abstractmethod
    def learn(self, data: DataProto) -> StepResult:
        """One optimizer step."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def train_batch(self, data: DataProto) -> DataProto:
        """One optimizer step; `meta_info["metrics"]` says what happened."""
        rate = self.engine.learning_rate
        with self.engine.train_mode():
            result = self.learn(data)
        self.engine.lr_scheduler_step()
        metrics = {
            "loss": result.loss,
            **result.metrics,
            "grad_norm": result.grad_norm,
            "lr": rate,
            "skipped_steps": float(result.skipped),
        }
        return DataProto({}, {"metrics": {f"train/{name}": value for name, value in metrics.items()}})
