"""Linear layers with packed copies of their weights: the layouts that CPU kernels multiply fastest.

    use_packable_linears(hf)               # once, in the model that the generator has built
    with packed_linears(hf, num_rows=64, num_steps=128):
        ...                                # linear layers multiply with packed copies of their present weights

A decode step multiplies a few rows with every weight, and a plain linear layer spends more time on reordering the
weight than on the products. Each generation packs the weights anew, because an optimizer may write to a weight in
place without a trace. Log-probs differ from those of plain layers by rounding.

`benchmarks/rollout.py` measures which layout is fastest. `Transposed` and `SplitByThread` use public operators.
`MKLPacked` and `OneDNNPacked` use operators of torch that are not public; layers do without them if they are missing
or wrong. Plain layers serve other devices, other dtypes, and a few rows, which take no longer than reading the weights.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS = 4
"""Fewer rows are multiplied with the plain weight."""

MANY_INPUTS, MIN_ROWS_MANY_INPUTS = 512, 9
"""On several threads, layers with `MANY_INPUTS` or more multiply fewer rows than this with the plain weight."""

MIN_ROWS_SPLIT = 20
"""Rows from which on a layer with fewer inputs is split among threads."""

ROW_THRESHOLDS = (1, MIN_ROWS, MIN_ROWS_MANY_INPUTS, MIN_ROWS_SPLIT)
"""Numbers of rows at which the fastest product may change."""

MIN_SPLIT_SIZE = 2**17
"""Smaller weights are transposed instead of split among threads."""

MIN_STEPS = 16
"""A generation of fewer steps ends before packing has paid off."""

MIN_MKL_SIZE = 2**18
"""Smaller weights are transposed where MKL is fast; MKL's layout pays off for larger ones."""

MIN_MKL_OUTPUTS = 768
"""With several threads, weights with fewer outputs are split: MKL multiplies its own layout on one thread."""

MAX_PLAIN_SIZE = 2**12
"""Weights up to this size are not repacked where MKL is slow."""

ONEDNN_ROWS = 16
"""The number of rows for which oneDNN chooses its layout; the layout is valid for other numbers."""

MKL_ROWS = 512
"""The number of rows for which MKL chooses its layout, and the most that it multiplies at once."""

MAX_TRIED_OUTPUTS = 8192
"""The most outputs with which a layout is tried; all outputs of a large vocabulary would take seconds."""

Product = Callable[[Tensor], Tensor]


class PackedWeight(Protocol):
    """A copy of a layer's weight in some layout."""

    def product(self, rows: int) -> Product:
        """Return the layer's function for at least `rows` rows."""
        ...


class Transposed:
    """A copy with the memory layout (inputs, outputs)."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.packed = weight.t().contiguous().t()

    def product(self, rows: int) -> Product:
        return functools.partial(F.linear, weight=self.weight if rows < MIN_ROWS else self.packed, bias=self.bias)


class SplitByThread:
    """A copy with one block of outputs per thread, (threads, inputs, outputs of a thread).

    MKL multiplies a few rows on one thread; in a batch of products each thread takes one. That gains nothing with
    fewer rows than `MIN_ROWS_SPLIT`, so there is a transposed copy too, unless `MANY_INPUTS` makes it slower.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        transposed = weight.t().contiguous()
        self.split = transposed.view(len(transposed), torch.get_num_threads(), -1).transpose(0, 1).contiguous()
        self.transposed = None if len(transposed) >= MANY_INPUTS else transposed.t()

    def product(self, rows: int) -> Product:
        if rows >= (MIN_ROWS_SPLIT if self.transposed is not None else MIN_ROWS_MANY_INPUTS):
            return self._product
        weight = self.weight if self.transposed is None or rows < MIN_ROWS else self.transposed
        return functools.partial(F.linear, weight=weight, bias=self.bias)

    def _product(self, input: Tensor) -> Tensor:
        blocks, inputs, outputs = self.split.shape
        rows = input.reshape(-1, inputs).expand(blocks, -1, -1)
        if self.bias is None:
            product = torch.bmm(rows, self.split)
        else:
            product = torch.baddbmm(self.bias.view(blocks, 1, outputs), rows, self.split)
        return product.transpose(0, 1).reshape(*input.shape[:-1], blocks * outputs)


class MKLPacked:
    """A copy in MKL's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, MKL_ROWS)

    def product(self, rows: int) -> Product:
        return self._product

    def _product(self, input: Tensor) -> Tensor:
        # torch uses the packed copy only if the last argument equals the number of rows.
        rows = input.numel() // self.weight.shape[1]
        return torch.ops.mkl._mkl_linear.default(input, self.packed, self.weight, self.bias, rows)


class OneDNNPacked:
    """A copy in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS)

    def product(self, rows: int) -> Product:
        if rows < MIN_ROWS:
            return functools.partial(F.linear, weight=self.weight, bias=self.bias)
        product, packed, bias = torch.ops.mkldnn._linear_pointwise.default, self.packed, self.bias
        return lambda input: product(input, packed, bias, "none", [], "")


class PackableLinear(nn.Linear):
    """A linear layer that multiplies with `packed` while a generation has packed its weight."""

    packed: PackedWeight | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(input, self.weight, self.bias)
        return self.packed.product(input.numel() // self.in_features)(input)


def use_packable_linears(model: nn.Module) -> None:
    """Replace each plain `nn.Linear` inside `model`, which the generator has built, by a `PackableLinear`."""
    replacements: dict[nn.Module, PackableLinear] = {}  # a layer may be in several places
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if type(layer) is nn.Linear:
            if layer not in replacements:
                replacements[layer] = _packable(layer)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, replacements[layer])


def _packable(layer: nn.Linear) -> PackableLinear:
    packable = PackableLinear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    packable.weight, packable.bias = layer.weight, layer.bias
    return packable.train(layer.training)


@contextmanager
def packed_linears(model: nn.Module, num_rows: int, num_steps: int) -> Iterator[None]:
    """Pack the weights of `model`'s linear layers inside the context, if that pays off."""
    layers = [layer for layer in model.modules() if isinstance(layer, PackableLinear)]
    try:
        if num_rows >= MIN_ROWS and num_steps >= MIN_STEPS:
            for layer in layers:
                layout = _layout_for(layer)
                if layout is not None:
                    bias = None if layer.bias is None else layer.bias.detach()
                    layer.packed = layout(layer.weight.detach(), bias)
        yield
    finally:
        for layer in layers:
            layer.packed = None


def product_of(layer: nn.Linear, rows: int) -> Product:
    """Return the layer's function for at least `rows` rows, on its packed weight if it has one."""
    if isinstance(layer, PackableLinear) and layer.packed is not None:
        return layer.packed.product(rows)
    return functools.partial(F.linear, weight=layer.weight, bias=layer.bias)


Layout = Callable[[Tensor, Tensor | None], PackedWeight]


def _layout_for(layer: PackableLinear) -> Layout | None:
    """Return the fastest layout on this machine, or None if the plain weight is fastest or the layer has hooks."""
    if layer._forward_hooks or layer._forward_pre_hooks:
        return None
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    shape = min(len(weight), MAX_TRIED_OUTPUTS), weight.shape[1]
    if _mkl_is_fast():
        threads = torch.get_num_threads()
        fits_mkl = weight.numel() >= MIN_MKL_SIZE and (len(weight) >= MIN_MKL_OUTPUTS or threads == 1)
        if fits_mkl and _works(MKLPacked, *shape):
            return MKLPacked
        return Transposed if threads == 1 or weight.numel() < MIN_SPLIT_SIZE or len(weight) % threads else SplitByThread
    return OneDNNPacked if weight.numel() > MAX_PLAIN_SIZE and _works(OneDNNPacked, *shape) else None


@functools.cache
def _mkl_is_fast() -> bool:
    """Return whether MKL uses its best float32 kernels, which it does on Intel processors only."""
    cpuinfo = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text("utf-8")


@functools.cache
def _works(layout: type[MKLPacked] | type[OneDNNPacked], outputs: int, inputs: int) -> bool:
    """Try a layout with a weight of this shape: is it there on this processor, and right for other numbers of rows?

    Neither library promises that a layout is valid for other numbers of rows than the one it was made for.
    """
    available = torch.backends.mkl.is_available() if layout is MKLPacked else torch.backends.mkldnn.is_available()
    if not available or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    weight = torch.arange(outputs * inputs, dtype=torch.float32).view(outputs, inputs).sin()
    bias = weight[:, 0].clone()
    try:
        packed: Any = layout(weight, bias)
        numbers = torch.arange(inputs * (MKL_ROWS + 1), dtype=torch.float32).view(1, -1, inputs).cos()
        samples = [numbers[:, :rows] for rows in (1, MIN_ROWS, 33, MKL_ROWS + 1)]
        return all(
            torch.allclose(packed.product(x.shape[1])(x), F.linear(x, weight, bias), rtol=1e-4, atol=1e-6 * inputs)
            for x in samples
        )
    except (AttributeError, RuntimeError, TypeError):
        return False
