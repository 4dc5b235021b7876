"""Selection of tokens by statistics over a mini-batch: entropy, and the covariance of log-prob and advantage.

    covariance = covariances(old_log_probs, advantages, mask)
    selected = largest_tokens(covariance, mask, ratio=2e-4)

The trainer calls these functions before the update, with the tokens of a whole mini-batch, so the result depends
neither on micro-batches nor on ranks. Tensors are (N,); values outside the mask are never read, and are not selected.
An empty mask selects nothing.
"""

import math

import torch
from torch import Tensor

from camshaft.algorithms.masked import masked_mean


@torch.no_grad()
def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute (A - mean A) (log pi - mean log pi) of each token, (N,) float64 and 0 outside the mask.

    Its mean is the covariance of log-prob and advantage, to which the entropy of the policy changes in proportion, with
    the opposite sign: Cui et al., arXiv:2505.22617. Equal advantages give 0.
    """
    log_probs, advantages = (torch.where(mask, x.double(), 0) for x in (log_probs, advantages))
    product = (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))
    return torch.where(mask, product, 0)


@torch.no_grad()
def tokens_between(values: Tensor, mask: Tensor, ratio: float, bounds: tuple[float, float], order: Tensor) -> Tensor:
    """Select tokens whose value is strictly between the bounds, (N,) bool: at most `ratio` of the tokens in the mask.

    If there are more candidates, those with the smallest `order` are selected, (N,), such as random numbers. At least
    one token is selected if there is a candidate.
    """
    candidates = mask & (values > bounds[0]) & (values < bounds[1])
    count = min(_share(mask, ratio), int(candidates.sum()))
    ranked = torch.where(candidates, order.double(), math.inf).argsort(stable=True)
    return torch.zeros_like(mask).index_fill(0, ranked[:count], True)


@torch.no_grad()
def largest_tokens(values: Tensor, mask: Tensor, ratio: float) -> Tensor:
    """Select the `ratio` of the tokens in the mask with the largest values, (N,) bool, and at least one of them.

    Of equal values, the first ones are selected.
    """
    ranked = torch.where(mask, values.double(), -math.inf).argsort(descending=True, stable=True)
    return torch.zeros_like(mask).index_fill(0, ranked[: _share(mask, ratio)], True)


def _share(mask: Tensor, ratio: float) -> int:
    total = int(mask.sum())
    return min(max(int(ratio * total), 1), total)


@torch.no_grad()
def high_entropy_tokens(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Select the tokens whose entropy is at least the quantile 1 - `quantile` of the entropies in the mask, (N,) bool.

    A quantile between two entropies is interpolated. 0.2 selects a fifth of the tokens, and more if entropies are
    equal; 0 selects the tokens with the largest entropy; 1 selects all. Wang et al., arXiv:2506.01939.
    """
    values = entropy[mask].double().sort().values
    if not len(values):
        return mask
    index = math.ceil(round((1 - quantile) * (len(values) - 1), 6))
    return mask & (entropy >= values[index])
