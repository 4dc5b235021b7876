"""Losses that are sums over tokens, for training loops that scale advantages and weights themselves.

    loss = LOSSES["ppo"]
    loss.required                                                   # ("logprobs", "advantages")
    loss.options                                                    # {"clip_low_threshold": 0.8, ...}
    engine.set_loss_fn(loss.bind({"clip_high_threshold": 1.3}))
    engine.forward_backward_step(batch, StepContext(outputs=("target_log_probs",)))

Names and formulas are those of the Tinker API. No number of tokens or sequences divides anything, so the loss of a
batch is the sum of the losses of its parts. A function receives flat tensors (N,) and returns the loss of each token.

A token has log pi, the log-prob of its target; `old_log_probs` (column `logprobs`) is that of the policy that sampled
it, and A its advantage. ratio = exp(log pi - log pi_old); unlike in `policy_losses.py`, the difference is not clamped.
sg stops the gradient.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from camshaft.algorithms.losses import TokenMask, row_sums


def cross_entropy(log_probs: Tensor, weights: Tensor) -> Tensor:
    """Compute -weight log pi of each token, (N,) -> (N,). Weights may be negative or fractional."""
    return -weights * log_probs


def importance_sampling(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Compute -A ratio of each token, (N,) -> (N,)."""
    return -advantages * _ratio(log_probs - old_log_probs, advantages)


def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Tensor:
    """Compute -min(A ratio, A clip(ratio, low, high)) of each token, (N,) -> (N,). Schulman et al., arXiv:1707.06347.

    The thresholds are bounds of the ratio, not distances from 1.
    """
    ratio = _ratio(log_probs - old_log_probs, advantages)
    return _pessimistic(ratio, advantages, clip_low_threshold, clip_high_threshold)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Tensor:
    """Compute -sg(clip(ratio, low, high)) A log pi of each token, (N,) -> (N,). MiniMax, arXiv:2506.13585."""
    ratio = _ratio(log_probs - old_log_probs, advantages).detach()
    return -ratio.clamp(clip_low_threshold, clip_high_threshold) * advantages * log_probs


def dro(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, beta: float) -> Tensor:
    """Compute -(A log pi - beta / 2 (log pi - log pi_old)^2) of each token, (N,) -> (N,).

    The quadratic term also counts where A is 0. Richemond et al., arXiv:2405.19107.
    """
    return beta / 2 * (log_probs - old_log_probs).square() - advantages * log_probs


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    ratio_mask: Tensor,
    *,
    lengths: Tensor,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> Tensor:
    """Compute -min(A s_t, A clip(s_t, low, high)) of each token, (N,) -> (N,). Zheng et al., arXiv:2507.18071.

    s   = exp(mean_t (log pi - log pi_old)) over the tokens of the row at which `ratio_mask` is not 0; 1 without any
    s_t = sg(s) pi / sg(pi), whose value is s and whose gradient is that of token t

    `lengths` (B,) are the row lengths on the device. The mask has no effect beyond the mean.
    """
    is_included = ratio_mask != 0
    difference = torch.where(is_included, (log_probs - old_log_probs).detach(), 0)
    means = row_sums(difference, lengths) / row_sums(is_included.to(difference.dtype), lengths).clamp(min=1)
    row_means = torch.repeat_interleave(means, lengths, output_size=len(log_probs))
    ratio = _ratio(log_probs - log_probs.detach() + row_means, advantages)
    return _pessimistic(ratio, advantages, clip_low_threshold, clip_high_threshold)


def _ratio(difference: Tensor, advantages: Tensor) -> Tensor:
    """Return exp(difference), and 1 at tokens without advantage, where an overflow would turn their 0 into NaN."""
    return torch.where(advantages != 0, difference, 0).exp()


def _pessimistic(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(advantages * ratio, advantages * ratio.clamp(low, high))


class TokenRows(Protocol):
    """Rows of a micro-batch, such as a `DataProto`."""

    def ragged(self, name: str) -> TokenMask: ...
    def __contains__(self, name: str) -> bool: ...


BoundLoss = Callable[[TokenRows, Mapping[str, Any], Any], tuple[Tensor, Any]]
"""Loss function of an engine: `(data, predictions, ctx) -> (loss, ctx)`."""


@dataclass(frozen=True)
class TokenLoss:
    """A loss, the columns that it reads, and its options."""

    name: str
    function: Callable[..., Tensor]
    """Takes the log-probs and the columns as positional arguments, and the options as keywords."""
    required: tuple[str, ...]
    """Columns that the batch must have, with one value per token of `input_ids`."""
    optional: tuple[str, ...] = ()
    """Columns after the required ones, which are 1 everywhere if the batch does not have them."""
    options: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Options with their defaults; None if there is no default."""
    uses_rows: bool = False
    """True if the function also takes the row lengths, as the keyword `lengths`."""

    def check_columns(self, names: Iterable[str]) -> None:
        """Raise ValueError if a required column is missing in `names`, or the loss does not read one of them."""
        given, known = set(names), (*self.required, *self.optional)
        for name in self.required:
            if name not in given:
                raise ValueError(f"loss {self.name} requires the column '{name}'; add one value per token")
        for name in sorted(given.difference(known)):
            raise ValueError(f"loss {self.name} does not read the column '{name}'; its columns are {', '.join(known)}")

    def check_options(self, options: Mapping[str, Any]) -> dict[str, float]:
        """Return all options, with defaults for those not given. Raise ValueError for an unknown or invalid one."""
        for name, value in options.items():
            if name not in self.options:
                known = f"its options are {', '.join(self.options)}" if self.options else "it has no options"
                raise ValueError(f"loss {self.name} has no option '{name}'; {known}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"loss {self.name}: {name}={value!r} is not a finite number")
        values: dict[str, float] = {}
        for name, default in self.options.items():
            value = options.get(name, default)
            if value is None:
                raise ValueError(f"loss {self.name} requires the option '{name}'; it has no default")
            values[name] = float(value)
        low, high = values.get("clip_low_threshold", 0.0), values.get("clip_high_threshold", math.inf)
        if low > high:
            raise ValueError(f"loss {self.name}: clip_low_threshold={low} is above clip_high_threshold={high}")
        return values

    def notice(self, options: Mapping[str, Any]) -> str | None:
        """Return a sentence about defaults that rarely suit the loss, or None."""
        missing = [name for name in self.options if name not in options]
        if self.name != "gspo" or not missing:
            return None
        values = ", ".join(f"{name}={self.options[name]}" for name in missing)
        return (
            f"loss gspo uses {values}, the defaults of ppo, which hardly ever clip the ratio of a sequence; the range "
            "of its paper is clip_low_threshold=0.9997 and clip_high_threshold=1.0004"
        )

    def bind(self, options: Mapping[str, Any] | None = None) -> BoundLoss:
        """Return the loss with these options as a loss function of an engine. Warn if `notice` has a sentence.

        It reads the prediction `target_log_probs`, or `log_probs` without it, at the tokens of `loss_mask`, and returns
        the sum of their losses.
        """
        options = options or {}
        values = self.check_options(options)
        if (notice := self.notice(options)) is not None:
            warnings.warn(notice, stacklevel=2)

        def loss_fn(data: TokenRows, predictions: Mapping[str, Any], ctx: Any) -> tuple[Tensor, Any]:
            output = "target_log_probs" if "target_log_probs" in predictions else "log_probs"
            log_probs: Tensor = predictions[output].values
            mask = data.ragged("loss_mask")
            columns = [self._column(name, data, log_probs, mask.values) for name in (*self.required, *self.optional)]
            rows = {"lengths": mask.device_lengths} if self.uses_rows else {}
            # What is not counted is 0 in all columns, and so are its loss and its gradient.
            log_probs = torch.where(mask.values, log_probs, 0)
            ctx["loss_is_sum"] = True
            return self.function(log_probs, *columns, **rows, **values).sum(), ctx

        return loss_fn

    def _column(self, name: str, data: TokenRows, log_probs: Tensor, mask: Tensor) -> Tensor:
        """Return a column in the dtype of the log-probs, with 0 outside the mask."""
        if name in self.optional and name not in data:
            return mask.to(log_probs.dtype)
        return torch.where(mask, data.ragged(name).values.to(log_probs.dtype), 0)


_RATIO = ("logprobs", "advantages")
_CLIP: Mapping[str, float | None] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: dict[str, TokenLoss] = {
    loss.name: loss
    for loss in (
        TokenLoss("cross_entropy", cross_entropy, required=(), optional=("weights",)),
        TokenLoss("importance_sampling", importance_sampling, _RATIO),
        TokenLoss("ppo", ppo, _RATIO, options=_CLIP),
        TokenLoss("cispo", cispo, _RATIO, options=_CLIP),
        TokenLoss("dro", dro, _RATIO, options={"beta": None}),
        TokenLoss("gspo", gspo, (*_RATIO, "sequence_ratio_mask"), options=_CLIP, uses_rows=True),
    )
}
"""Losses by the names of the Tinker API, which also names the columns: `logprobs` are those of the sampling policy."""
