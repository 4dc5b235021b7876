"""Linear layers with a copy of their weights in the order that the CPU's kernels want, while one call generates.

    with packed_linears(hf, num_rows=64, num_steps=128):
        ...                                # the model's linear layers use the copies
                                           # and here they are what they were before

A step of generation multiplies a few rows with every weight, and what a plain linear layer reorders or skips
through each time costs more than the products. The copies are made anew in each call: nothing tells whether an
optimizer has written to a weight since. Log-probs differ from those of plain layers in the last bits.

Which order is best was measured (`benchmarks/rollout.py`): `Turned` and `Split` need nothing special, `Packed` is
MKL's own and `Blocked` oneDNN's, by operators of torch that are not public: where they are missing or wrong, layers do
without. Plain ones serve other devices, other dtypes, and a few rows, whose time is that of reading the weights.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 4
"""Fewer rows than this are left to the plain layer."""

LONG, FEW_LONG = 512, 9
"""Fewer rows than `FEW_LONG` are left to the plain layer on several threads if it has at least `LONG` inputs."""

MANY = 20
"""So many rows are shared out among threads if the layer has fewer inputs."""

STEPS = 16
"""A call of fewer steps is over before the copies have paid."""

SMALL = 2**18
"""A weight of fewer numbers is turned where MKL is fast: MKL's own order pays for larger ones."""

WIDE = 768
"""A weight with fewer outputs is split if there are several threads: MKL's own order keeps it to one of them."""

TINY = 2**12
"""A weight of at most so many numbers is left plain where MKL is not fast."""

ROWS_HINT = 16
"""The number of rows for which oneDNN chooses its order; others work with it."""

ROWS_PACKED = 512
"""Likewise for MKL, which multiplies at most so many rows in one go."""

TRIED = 8192
"""Outputs with which an order is tried: all those of a large vocabulary would take seconds."""


class Turned(nn.Linear):
    """A linear layer with a copy of its weight whose numbers lie in the order (in, out)."""

    copied: Tensor

    def forward(self, input: Tensor) -> Tensor:
        few = input.numel() < FEW * self.in_features
        return F.linear(input, self.weight if few else self.copied, self.bias)

    # There are no hooks, and what nn.Module does around a call takes as long as a small product.
    __call__ = forward

    @staticmethod
    def copy(weight: Tensor) -> Tensor:
        return weight.t().contiguous().t()


class Packed(nn.Linear):
    """A linear layer with a copy of its weight in the order of MKL."""

    copied: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.copied, self.weight, self.bias)

    __call__ = forward

    @staticmethod
    def product(rows: Tensor, copied: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The last number is compared with that of the rows; where it differs, the copy would not be used.
        return torch.ops.mkl._mkl_linear.default(rows, copied, weight, bias, rows.numel() // weight.shape[1])

    @staticmethod
    def copy(weight: Tensor) -> Tensor:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS_PACKED)


class Blocked(nn.Linear):
    """A linear layer with a copy of its weight in the order of oneDNN."""

    copied: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() < FEW * self.in_features:
            return F.linear(input, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, self.copied, self.bias, "none", [], "")

    __call__ = forward

    @staticmethod
    def copy(weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)


class Split(nn.Linear):
    """A linear layer with a copy of its weight that has a block of the outputs for each thread.

    A product of few rows keeps MKL to one thread; of several products at once each thread takes its own. With fewer
    rows than `many` that takes longer than it gains, and the layer is as a turned one.
    """

    copied: tuple[Tensor | None, Tensor]
    """In the order (in, out), where that is ever faster, and (threads, in, outputs of a thread)."""

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias, self.copied)

    __call__ = forward

    @staticmethod
    def product(input: Tensor, weight: Tensor, bias: Tensor | None, copied: tuple[Tensor | None, Tensor]) -> Tensor:
        turned, split = copied
        blocks, inputs, outputs = split.shape
        numbers = input.numel()
        if numbers < (MANY if turned is not None else FEW_LONG) * inputs:
            return F.linear(input, weight if turned is None or numbers < FEW * inputs else turned, bias)
        rows = input.reshape(-1, inputs).expand(blocks, -1, -1)
        found = torch.bmm(rows, split) if bias is None else torch.baddbmm(bias.view(blocks, 1, outputs), rows, split)
        return found.transpose(0, 1).reshape(*input.shape[:-1], blocks * outputs)

    @staticmethod
    def copy(weight: Tensor) -> tuple[Tensor | None, Tensor]:
        split = weight.view(torch.get_num_threads(), -1, weight.shape[1]).transpose(1, 2).contiguous()
        return None if weight.shape[1] >= LONG else Turned.copy(weight), split


@contextmanager
def packed_linears(hf: nn.Module, num_rows: int, num_steps: int) -> Iterator[None]:
    """Inside, linear layers of `hf` use copies of their weights as they are now, if that pays."""
    changed: list[Any] = []
    try:
        if num_rows >= FEW and num_steps >= STEPS:
            for module in hf.modules():
                kind = _kind_for(module)
                if kind is not None:
                    layer: Any = module
                    layer.copied = kind.copy(layer.weight.detach())
                    layer.__class__ = kind
                    changed.append(layer)
        yield
    finally:
        for module in changed:
            del module.copied
            module.__class__ = nn.Linear


def product_of(layer: Any, few: bool) -> Callable[[Tensor], Tensor]:
    """What a linear layer computes, of fewer rows than `FEW` or of so many and more, with its copy if it has one."""
    weight, bias = layer.weight, layer.bias
    if isinstance(layer, Packed):
        return functools.partial(Packed.product, copied=layer.copied, weight=weight, bias=bias)
    if isinstance(layer, Blocked) and not few:
        product, copied = torch.ops.mkldnn._linear_pointwise.default, layer.copied
        return lambda rows: product(rows, copied, bias, "none", [], "")
    if isinstance(layer, Split) and not few:
        return functools.partial(Split.product, weight=weight, bias=bias, copied=layer.copied)
    if isinstance(layer, Turned) and not few:
        return functools.partial(F.linear, weight=layer.copied, bias=bias)
    return functools.partial(F.linear, weight=weight, bias=bias)


def _kind_for(module: nn.Module) -> type[Turned] | type[Split] | type[Packed] | type[Blocked] | None:
    """What is best for this layer on this machine; None for what is no plain linear layer or should stay one."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return None
    weight = module.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    shape = min(len(weight), TRIED), weight.shape[1]
    if _mkl_is_fast():
        threads = torch.get_num_threads()
        if weight.numel() >= SMALL and (len(weight) >= WIDE or threads == 1) and _works(Packed, *shape):
            return Packed
        return Turned if threads == 1 or len(weight) % threads else Split
    return Blocked if weight.numel() > TINY and _works(Blocked, *shape) else None


@functools.cache
def _mkl_is_fast() -> bool:
    """MKL computes float32 by its best kernels on processors of its own maker only."""
    about = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and about.is_file() and "GenuineIntel" in about.read_text("utf-8")


@functools.cache
def _works(kind: type[Packed] | type[Blocked], outputs: int, inputs: int) -> bool:
    """Whether this torch has the operators for this processor, tried on a few products with a weight of this shape.

    Neither library promises that its order serves other numbers of rows than it was made for.
    """
    there = torch.backends.mkl.is_available() if kind is Packed else torch.backends.mkldnn.is_available()
    if not there or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    plain, layer = (nn.Linear(inputs, outputs, device="meta") for _ in range(2))
    weight = torch.arange(outputs * inputs, dtype=torch.float32).view(outputs, inputs).sin()
    for one in (plain, layer):
        one.weight, one.bias = nn.Parameter(weight, False), nn.Parameter(weight[:, 0].clone(), False)
    try:
        changed: Any = layer
        changed.copied = kind.copy(weight)
        changed.__class__ = kind
        numbers = torch.arange(inputs * (ROWS_PACKED + 1), dtype=torch.float32).view(1, -1, inputs).cos()
        tried = [numbers[:, :rows] for rows in (1, FEW, 33, ROWS_PACKED + 1)]
        return all(torch.allclose(changed(rows), plain(rows), rtol=1e-4, atol=1e-6 * inputs) for rows in tried)
    except (AttributeError, RuntimeError, TypeError):
        return False
