"""Linear layers with packed copies of their weights in the layouts that CPU kernels multiply fastest.

    use_packable_linears(hf)               # once, in the model that the generator has built
    with packed_linears(hf, num_rows=64, num_steps=128):
        ...                                # linear layers multiply with packed copies of their current weights

A decode step multiplies every weight with a few rows. `F.linear` then spends more time on reordering the weight than on
the multiplication. Each generation packs the weights again, because an optimizer may update a weight in place without
incrementing its version. Only the turns of a conversation share packed copies, as they share computed keys and values
(`copies`). Log-probs differ from those of `F.linear` by rounding.

`benchmarks/rollout.py` measures which layout is fastest. `Transposed` and `SplitByThread` use public operators.
`MKLPacked` and `OneDNNPacked` use private operators of torch, and are skipped if these are missing or give wrong
results. Layers on other devices or with other dtypes use `F.linear` with the unpacked weight. So do products with very
few rows, which take no longer than reading the weight.
"""

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS = 4
"""Minimum number of rows to multiply with a packed weight."""

MANY_INPUTS, MIN_ROWS_MANY_INPUTS = 512, 9
"""Minimum number of rows to multiply with a packed weight on several threads if a layer has `MANY_INPUTS` inputs or
more."""

MIN_ROWS_SPLIT = 20
"""Minimum number of rows to split a layer with fewer than `MANY_INPUTS` inputs among threads."""

ROW_THRESHOLDS = (1, MIN_ROWS, MIN_ROWS_MANY_INPUTS, MIN_ROWS_SPLIT)
"""Numbers of rows at which the fastest product may change."""

MIN_SPLIT_SIZE = 2**17
"""Minimum size of a weight to split among threads. Smaller weights are transposed."""

MIN_STEPS = 16
"""Minimum number of decode steps for which packing the weights saves time."""

MIN_MKL_SIZE = 2**18
"""Minimum size of a weight for MKL's layout. If MKL is fast, smaller weights are transposed."""

MIN_MKL_OUTPUTS = 768
"""Minimum number of outputs for MKL's layout on several threads. MKL multiplies this layout on a single thread, so
weights with fewer outputs are split among threads."""

MAX_PLAIN_SIZE = 2**12
"""Maximum size of a weight that is not packed if MKL is slow."""

ONEDNN_ROWS = 16
"""Number of rows for which oneDNN chooses its layout. The layout is also valid for other numbers of rows."""

MKL_ROWS = 512
"""Number of rows for which MKL chooses its layout, and the maximum number that it multiplies at once."""

MAX_TRIED_OUTPUTS = 8192
"""Maximum number of outputs in a test of a layout. Testing all outputs of a large vocabulary would take seconds."""

Product = Callable[[Tensor], Tensor]


class Transposed:
    """A copy of the weight with the memory layout (inputs, outputs)."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.packed = weight.t().contiguous().t()

    def product(self, rows: int) -> Product:
        return functools.partial(F.linear, weight=self.weight if rows < MIN_ROWS else self.packed, bias=self.bias)


class SplitByThread:
    """A copy of the weight with one block of outputs per thread, shape (threads, inputs, outputs per thread).

    MKL multiplies a few rows on a single thread. In a batched product, each thread computes one block instead. With
    fewer than `MIN_ROWS_SPLIT` rows this is not faster, so a transposed copy is kept too. Layers with `MANY_INPUTS`
    inputs or more have no transposed copy, because it would be slower.
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
    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS)

    def product(self, rows: int) -> Product:
        if rows < MIN_ROWS:
            return functools.partial(F.linear, weight=self.weight, bias=self.bias)
        product, packed, bias = torch.ops.mkldnn._linear_pointwise.default, self.packed, self.bias
        return lambda input: product(input, packed, bias, "none", [], "")


PackedWeight = Transposed | SplitByThread | MKLPacked | OneDNNPacked
"""A packed copy of a weight. `product(rows)` returns a function that computes the layer for at least `rows` rows."""
Layout = Callable[[Tensor, Tensor | None], PackedWeight]
Choice = Callable[["PackableLinear"], Layout | None]
Copies = dict["PackableLinear", PackedWeight]
"""Packed copies of the weights of layers. Their owner drops them when the values of a weight change."""


class PackableLinear(nn.Linear):
    """A linear layer that multiplies by `packed` inside a `packed_linears` context."""

    packed: PackedWeight | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(input, self.weight, self.bias)
        return self.packed.product(input.numel() // self.in_features)(input)


def use_packable_linears(model: nn.Module) -> None:
    """Replace each `nn.Linear` (but no subclass) with a `PackableLinear`. The generator has built `model` itself."""
    replacements: dict[nn.Module, PackableLinear] = {}  # several modules may share a layer
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if type(layer) is nn.Linear:
            if layer not in replacements:
                replacements[layer] = _make_packable(layer)
            model.set_submodule(name, replacements[layer])


def _make_packable(layer: nn.Linear) -> PackableLinear:
    packable = PackableLinear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    packable.weight, packable.bias = layer.weight, layer.bias
    return packable.train(layer.training)


def choose_layout(layer: PackableLinear) -> Layout | None:
    """Return the fastest layout on this machine, or None if the unpacked weight is fastest or the layer has hooks."""
    if layer._forward_hooks or layer._forward_pre_hooks:
        return None
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    shape = min(len(weight), MAX_TRIED_OUTPUTS), weight.shape[1]
    if _mkl_is_fast():
        threads = torch.get_num_threads()
        fits_mkl = weight.numel() >= MIN_MKL_SIZE and (len(weight) >= MIN_MKL_OUTPUTS or threads == 1)
        if fits_mkl and is_layout_valid(MKLPacked, *shape):
            return MKLPacked
        return Transposed if threads == 1 or weight.numel() < MIN_SPLIT_SIZE or len(weight) % threads else SplitByThread
    return OneDNNPacked if weight.numel() > MAX_PLAIN_SIZE and is_layout_valid(OneDNNPacked, *shape) else None


@contextmanager
def packed_linears(
    model: nn.Module, num_rows: int, num_steps: int, choose: Choice = choose_layout, copies: Copies | None = None
) -> Iterator[None]:
    """Pack the weights of `model`'s linear layers inside the context if that saves time, unless `copies` has them."""
    copies = {} if copies is None else copies
    layers = [layer for layer in model.modules() if isinstance(layer, PackableLinear)]
    try:
        if num_rows >= MIN_ROWS and num_steps >= MIN_STEPS:
            for layer in layers:
                layout = choose(layer)
                if layout is not None:
                    if layer not in copies or not _is_copy(copies[layer], layout, layer):
                        bias = None if layer.bias is None else layer.bias.detach()
                        copies[layer] = layout(layer.weight.detach(), bias)
                    layer.packed = copies[layer]
        yield
    finally:
        for layer in layers:
            layer.packed = None


def has_packed(model: nn.Module) -> bool:
    """Return True inside of a `packed_linears` context that has packed weights."""
    return any(isinstance(layer, PackableLinear) and layer.packed is not None for layer in model.modules())


def _is_copy(packed: PackedWeight, layout: Layout, layer: PackableLinear) -> bool:
    """Return True if `packed` has this layout, and is a copy of the parameters that the layer has."""
    if type(packed) is not layout or packed.weight.data_ptr() != layer.weight.data_ptr():
        return False
    if packed.bias is None or layer.bias is None:
        return packed.bias is layer.bias
    return packed.bias.data_ptr() == layer.bias.data_ptr()


def select_product(layer: nn.Linear, rows: int) -> Product:
    """Return a function that computes `layer` for at least `rows` rows, with its packed weight if it has one."""
    if isinstance(layer, PackableLinear) and layer.packed is not None:
        return layer.packed.product(rows)
    return functools.partial(F.linear, weight=layer.weight, bias=layer.bias)


@functools.cache
def _mkl_is_fast() -> bool:
    """Return True if MKL uses its best float32 kernels, which it does only on Intel processors."""
    cpuinfo = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text("utf-8")


@functools.cache
def is_layout_valid(layout: type[MKLPacked] | type[OneDNNPacked], outputs: int, inputs: int) -> bool:
    """Return True if the layout is available on this processor and gives correct products for a weight of this shape.

    Neither library guarantees that a layout is valid for numbers of rows other than the one for which it was created.
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
