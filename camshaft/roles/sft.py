"""The model of supervised fine-tuning: one optimizer step a batch, cross-entropy over the trained tokens.

Reads `input_ids` and `loss_mask`. The mean of the loss is taken over the whole batch, however it is cut and over
however many ranks it is split.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from camshaft.algorithms import Counts, sft_loss
from camshaft.config import SFTConfig, sft_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.engine import StepContext, build_engine
from camshaft.roles.base import TrainedRole


def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    """Cross-entropy of the trained tokens."""
    mask = data.ragged("loss_mask")
    counts = Counts(mask.values, mask.lengths.to(mask.values.device), ctx["num_tokens"], ctx["num_sequences"])
    return sft_loss(predictions["log_probs"].values, counts), ctx


class SFTWorker(TrainedRole):
    """Language model and optimizer."""

    def __init__(self, config: SFTConfig, total_steps: int):
        super().__init__()
        self.config = config
        self.engine = build_engine(config.strategy, sft_engine(config, total_steps))
        self.engine.set_loss_fn(loss_fn)
        self.computes_in = config.fsdp_config.computes_in()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def train_batch(self, data: DataProto) -> DataProto:
        """One optimizer step; `meta_info["metrics"]` says what happened."""
        rate = self.engine.learning_rate
        with self.engine.train_mode():
            result = self.engine.train_batch(data)
        self.engine.lr_scheduler_step()
        metrics = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": rate,
            "train/skipped_steps": float(result.skipped),
        }
        return DataProto({}, {"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`log_probs` of the trained tokens, 0 elsewhere."""
        with self.engine.eval_mode():
            found = self.engine.infer_batch(data, StepContext(outputs=("log_probs",)))
        return DataProto.from_dict({"log_probs": found["log_probs"].to("cpu")})
