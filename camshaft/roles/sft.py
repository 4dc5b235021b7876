"""The model of supervised fine-tuning: cross-entropy over the unmasked tokens.

Reads `input_ids` and `loss_mask`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from camshaft.algorithms import Counts, sft_loss
from camshaft.config import SFTConfig, sft_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.device import to_device
from camshaft.engine import StepContext, StepResult
from camshaft.roles.supervised import SupervisedWorker


def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    """Compute the cross-entropy of the unmasked tokens."""
    mask = data.ragged("loss_mask")
    counts = Counts(mask.values, to_device(mask.lengths, mask.values.device), ctx["num_tokens"], ctx["num_sequences"])
    return sft_loss(predictions["log_probs"].values, counts), ctx


class SFTWorker(SupervisedWorker):
    """Language model and optimizer."""

    def __init__(self, config: SFTConfig, total_steps: int):
        super().__init__(config, sft_engine(config, total_steps))

    def optimizer_step(self, data: DataProto) -> StepResult:
        return self.engine.train_batch(data, loss_fn=loss_fn)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Compute `log_probs` of the unmasked tokens; 0 elsewhere."""
        with self.engine.eval_mode():
            predictions = self.engine.infer_batch(data, StepContext(outputs=("log_probs",)))
        return DataProto.from_dict({"log_probs": predictions["log_probs"].to("cpu")})
