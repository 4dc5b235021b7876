"""Computation in another dtype than that of the weights, for a model that is not sharded.

with cast_parameters(module, torch.bfloat16):
    loss = run(module)                  # computes in bfloat16
    loss.backward()                     # accumulates gradients in the dtype of the parameters
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def cast_parameters(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Replace the parameters of `module` by casts to `dtype` inside the block.

    A backward pass inside the block adds the gradient of a cast to the gradient of its parameter, in the dtype of the
    parameter. It must not run outside of the block, because activation checkpointing computes layers again.
    """
    owners = [(owner, name, p) for owner in module.modules() for name, p in owner._parameters.items() if p is not None]
    casts = {parameter: parameter.to(dtype) for _, _, parameter in owners}  # tied parameters share one cast
    try:
        for owner, name, parameter in owners:
            # As torch.func.functional_call does, whose block would end before the backward pass.
            owner._parameters[name] = casts[parameter]  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for owner, name, parameter in owners:
            owner._parameters[name] = parameter
