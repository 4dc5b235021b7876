"""Base class of the roles in `sft.py` and `rm.py`, which run one optimizer step per batch.

The loss is a mean over the whole batch and does not depend on the number of micro-batches or ranks.
"""

from abc import ABC, abstractmethod
from dataclasses import replace

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
        with self.update() as metrics:
            step = self.optimizer_step(data)
            metrics.add(replace(step, metrics={"loss": step.loss, **step.metrics}))
        return DataProto({}, {"metrics": metrics.result("train")})
