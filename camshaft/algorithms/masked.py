"""Masked statistics. Used by the estimators and by the trainer's metrics.

    whiten(advantages, mask)      # mean 0, variance 1 over the tokens where `mask` is set, 0 elsewhere

`mask` is bool and has the shape of the values. Values outside the mask, including NaN, affect neither the result nor
its gradient.
"""

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Compute sum_t m_t x_t over all elements or along `dim`."""
    return torch.where(mask, x, 0).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Compute sum_t m_t x_t / sum_t m_t over all elements or along `dim`; 0 for an empty mask."""
    return masked_sum(x, mask, dim) / mask.sum(dim).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Compute the unbiased variance sum_t m_t (x_t - mean)^2 / (M - 1), M = sum_t m_t, over all elements."""
    count = mask.sum()
    if count < 2:
        raise ValueError(
            f"a variance needs at least 2 masked-in tokens, the mask has {int(count)}; "
            "check for empty responses, or use a larger batch"
        )
    return masked_sum((x - masked_mean(x, mask)) ** 2, mask) / (count - 1)


def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) over the masked-in elements; 0 elsewhere."""
    centered = x - masked_mean(x, mask)
    return torch.where(mask, centered * torch.rsqrt(masked_var(x, mask) + eps), 0)
