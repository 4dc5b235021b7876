"""Masked sums, means and variances, used by the advantage estimators and the trainer's metrics.

    whiten(advantages, mask)      # mean 0 and variance 1 over the tokens where `mask` is True, 0 elsewhere

`mask` is a bool tensor with the shape of the values. Values outside the mask, including NaN, affect neither the result
nor its gradient.
"""

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Compute sum_t m_t x_t over all elements or along `dim`."""
    return torch.where(mask, x, 0).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Compute sum_t m_t x_t / sum_t m_t over all elements or along `dim`. An empty mask gives 0."""
    return masked_sum(x, mask, dim) / mask.sum(dim).clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Compute the unbiased variance sum_t m_t (x_t - mean)^2 / (M - 1) over all elements, with M = sum_t m_t."""
    count = mask.sum()
    if count < 2:
        raise ValueError(
            f"the variance requires at least 2 masked-in tokens, but the mask has {int(count)}; "
            "check for empty responses or increase the batch size"
        )
    return masked_sum((x - masked_mean(x, mask)) ** 2, mask) / (count - 1)


def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Normalize the masked-in elements to (x - mean) / sqrt(var + eps) and set the other elements to 0.

    A single element has no variance. Its mean counts as 0 and its variance as 1, so it is returned unchanged, like the
    reward of a GRPO group of one response. Equal elements give exact zeros.
    """
    if mask.sum() < 2:
        return torch.where(mask, x, 0)
    selected = x[mask]
    if (selected == selected[0]).all():  # otherwise, the division would amplify the rounding error of the mean
        return torch.zeros_like(x)
    centered = x - masked_mean(x, mask)
    return torch.where(mask, centered * torch.rsqrt(masked_var(x, mask) + eps), 0)
