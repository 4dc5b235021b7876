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

FROM_ROWS = (1, FEW, FEW_LONG, MANY)
"""Numbers of rows from which on another product may be the fastest."""

SPLIT = 2**17
"""A weight of fewer numbers is turned, and not split among threads."""

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


Product = Callable[[Tensor], Tensor]


class _Copied(nn.Linear):
    """A linear layer with a copy of its weight."""

    copied: Any
    copy: Callable[[Tensor], Any]
    product: Callable[[int], Product]
    """What it computes, as a function for at least so many rows."""

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input.numel() // self.in_features)(input)

    # There are no hooks, and what nn.Module does around a call takes as long as a small product.
    __call__ = forward


class Turned(_Copied):
    """With a copy whose numbers lie in the order (in, out)."""

    def product(self, rows: int) -> Product:
        return functools.partial(F.linear, weight=self.weight if rows < FEW else self.copied, bias=self.bias)

    @staticmethod
    def copy(weight: Tensor) -> Tensor:
        return weight.t().contiguous().t()


class Split(_Copied):
    """With a copy that has a block of the outputs for each thread, (threads, in, outputs of a thread).

    A product of few rows keeps MKL to one thread; of several products at once each thread takes its own. With fewer
    rows than `MANY` that takes longer than it gains, so there is a turned copy too, where that is ever faster.
    """

    def product(self, rows: int) -> Product:
        turned, split = self.copied
        if rows >= (MANY if turned is not None else FEW_LONG):
            return functools.partial(self._shared_out, weight=split, bias=self.bias)
        weight = self.weight if turned is None or rows < FEW else turned
        return functools.partial(F.linear, weight=weight, bias=self.bias)

    @staticmethod
    def _shared_out(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        blocks, inputs, outputs = weight.shape
        rows = input.reshape(-1, inputs).expand(blocks, -1, -1)
        found = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.view(blocks, 1, outputs), rows, weight)
        return found.transpose(0, 1).reshape(*input.shape[:-1], blocks * outputs)

    @staticmethod
    def copy(weight: Tensor) -> tuple[Tensor | None, Tensor]:
        turned = weight.t().contiguous()  # (in, out)
        split = turned.view(len(turned), torch.get_num_threads(), -1).transpose(0, 1).contiguous()
        return None if len(turned) >= LONG else turned.t(), split


class Packed(_Copied):
    """With a copy in the order of MKL."""

    def product(self, rows: int) -> Product:
        return functools.partial(self._product, copied=self.copied, weight=self.weight, bias=self.bias)

    @staticmethod
    def _product(input: Tensor, copied: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The last number is compared with that of the rows; where it differs, the copy would not be used.
        return torch.ops.mkl._mkl_linear.default(input, copied, weight, bias, input.numel() // weight.shape[1])

    @staticmethod
    def copy(weight: Tensor) -> Tensor:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS_PACKED)


class Blocked(_Copied):
    """With a copy in the order of oneDNN."""

    def product(self, rows: int) -> Product:
        if rows < FEW:
            return functools.partial(F.linear, weight=self.weight, bias=self.bias)
        product, copied, bias = torch.ops.mkldnn._linear_pointwise.default, self.copied, self.bias
        return lambda input: product(input, copied, bias, "none", [], "")

    @staticmethod
    def copy(weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)


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


def product_of(layer: Any, rows: int) -> Product:
    """What a linear layer computes, with its copy if it has one and that is faster; for at least so many rows."""
    if isinstance(layer, _Copied):
        return layer.product(rows)
    return functools.partial(F.linear, weight=layer.weight, bias=layer.bias)


def _kind_for(module: nn.Module) -> type[_Copied] | None:
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
        return Turned if threads == 1 or weight.numel() < SPLIT or len(weight) % threads else Split
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
