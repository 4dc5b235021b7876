"""Role of supervised fine-tuning, which trains a language model with the cross-entropy of the trained tokens.

The methods read the columns `input_ids` and `loss_mask`, which is True at trained tokens.
"""

from typing import Any

from torch import Tensor

from camshaft.algorithms import Counts, sft_loss
from camshaft.config import SFTConfig, sft_engine
from camshaft.controller import Dispatch, register
from camshaft.dataproto import DataProto
from camshaft.engine import StepContext, StepResult
from camshaft.roles.supervised import SupervisedWorker


def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    """Compute the cross-entropy of the trained tokens."""
    return sft_loss(predictions["log_probs"].values, Counts.of(data.ragged("loss_mask"), ctx)), ctx


class SFTWorker(SupervisedWorker):
    """A language model and its optimizer."""

    def __init__(self, config: SFTConfig, total_steps: int):
        super().__init__(config, sft_engine(config, total_steps))

    def optimizer_step(self, data: DataProto) -> StepResult:
        return self.engine.train_batch(data, loss_fn=loss_fn)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Compute the column `log_probs`, which is 0 at tokens that are not trained."""
        with self.engine.eval_mode():
            predictions = self.engine.infer_batch(data, StepContext(outputs=("log_probs",)))
        return DataProto.from_dict({"log_probs": predictions["log_probs"].to("cpu")})
