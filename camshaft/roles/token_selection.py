"""Arguments of a policy loss with the tokens that the trainer selected by statistics over a mini-batch."""

from typing import Any

from torch import Tensor

from camshaft.config.schema.policy_loss import PolicyLossConfig
from camshaft.dataproto import DataProto


def selected_tokens(loss: PolicyLossConfig, data: DataProto, weights: Tensor | None) -> dict[str, Any]:
    """Return the arguments of the policy loss for a micro-batch. Weights are 0 at tokens with a low entropy."""
    options: dict[str, Any] = {"weights": weights}
    if loss.top_entropy_quantile < 1:
        high_entropy = data["high_entropy"].values.float()
        options["weights"] = high_entropy if weights is None else weights * high_entropy
    if loss.loss_mode == "clip_cov":
        options["selected"] = data["selected_tokens"].values
    elif loss.loss_mode == "kl_cov":
        options["penalties"] = loss.ppo_kl_coef * data["selected_tokens"].values.float()
    return options
