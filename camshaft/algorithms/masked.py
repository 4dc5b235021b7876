"""Statistics over the tokens that count. Used by the estimators here and by the trainer's metrics.

    whiten(advantages, mask)      # mean 0, variance 1 over the tokens where `mask` is set, 0 elsewhere

`mask` is bool and has the shape of the values, whatever that is. Values outside it are never read: they
may be anything, NaN included, and neither the result nor its gradient changes.
"""

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum_t m_t x_t, over everything or along `dim`."""
    return torch.where(mask, x, 0).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """sum_t m_t x_t / sum_t m_t, over everything or along `dim`; 0 where nothing is counted."""
    return masked_sum(x, mask, dim) / mask.sum(dim).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """sum_t m_t (x_t - mean)^2 / (M - 1) with M = sum_t m_t: the unbiased variance over everything."""
    count = mask.sum()
    if count < 2:
        raise ValueError(
            f"a variance needs at least 2 counted tokens, the mask counts {int(count)}; "
            "were the responses empty, or is the batch too small?"
        )
    return masked_sum((x - masked_mean(x, mask)) ** 2, mask) / (count - 1)


def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over everything that counts; 0 elsewhere."""
    centred = x - masked_mean(x, mask)
    return torch.where(mask, centred * torch.rsqrt(masked_var(x, mask) + eps), 0)
