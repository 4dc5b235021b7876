"""Flash attention over packed segments and shared prefixes, on the emulated device, against float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.dense_attention import dense_attention
from support.emulated_cuda import DEVICE, emulated_cuda
from torch import Tensor

from camshaft.models.attention import packed_attention, packed_kwargs
from camshaft.models.flash import Bounds, packed_flash_attention, prefix_attention
from camshaft.models.packing import Packing

LAYER: Any = SimpleNamespace(is_causal=True, num_key_value_groups=2)

PACKINGS = {
    "segments": Packing([5, 1, 9, 2]),
    "shared": Packing([4, 2, 2, 3, 4, 6, 1], prefix_of=[None, 0, 0, 0, None, None, 5]),
    "shared by all": Packing([7, 3, 1], prefix_of=[None, 0, 0]),
}

TOLERANCE = 3 * 2**-8
"""Half the spacing of bfloat16 for each of three roundings: of a kernel's output, of the merged output, of a sum."""


def bounds_of(packing: Packing, device: str) -> Bounds:
    ends = torch.tensor([0, *packing.ends.tolist()], dtype=torch.int32, device=device)
    return Bounds(ends, ends, max(packing.lengths), max(packing.lengths))


def attend(packing: Packing, inputs: list[Tensor], grad: Tensor, device: str) -> list[Tensor]:
    """Return output and gradients of the kernels."""
    leaves: Any = [tensor.bfloat16().to(device).requires_grad_() for tensor in inputs]
    out = packed_flash_attention(*leaves, bounds=bounds_of(packing, device), packing=packing, scale=0.3)
    return [out.cpu(), *(x.cpu() for x in torch.autograd.grad(out, leaves, grad.bfloat16().to(device)))]


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS.keys())
def test_outputs_and_gradients_equal_those_of_whole_rows(packing: Packing) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(heads, packing.size, 8).bfloat16().double() for heads in (4, 2, 2)]
    grad = torch.randn(packing.size, 4, 8).bfloat16().double()
    exact = [tensor.clone().requires_grad_() for tensor in inputs]
    out = dense_attention(*exact, lengths=packing.lengths, parents=packing.prefix_of, scale=0.3)
    expected = [out, *torch.autograd.grad(out, exact, grad)]
    with emulated_cuda() as device:
        actual = attend(packing, inputs, grad, DEVICE)
        calls = 1 + (packing.prefix_of is not None)
        assert device.launches["_flash_attention_forward"] == device.launches["_flash_attention_backward"] == calls
        assert all("a test" in place for place in device.waits), device.waits
    for got, want in zip(actual, (tensor.detach() for tensor in expected), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE * float(want.abs().max()))


@pytest.mark.parametrize("window", [None, 3])
def test_a_sliding_window_excludes_earlier_tokens(window: int | None) -> None:
    torch.manual_seed(0)
    packing = Packing([7, 3])
    query, key, value = (torch.randn(heads, 10, 16).bfloat16() for heads in (4, 2, 2))
    with emulated_cuda():
        tensors = [tensor.to(DEVICE)[None] for tensor in (query, key, value)]
        kwargs = packed_kwargs(packing, DEVICE)
        actual, _ = packed_attention(LAYER, *tensors, scaling=0.25, sliding_window=window, **kwargs)
        actual = actual.cpu()[0]
    expected, _ = packed_attention(
        LAYER,
        *(tensor.double()[None] for tensor in (query, key, value)),
        scaling=0.25,
        sliding_window=window,
        **packed_kwargs(packing, "cpu"),
    )
    torch.testing.assert_close(actual.double(), expected[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS.keys())
def test_sinks_and_soft_caps_equal_those_of_whole_rows(
    packing: Packing, softcap: float | None, window: int | None
) -> None:
    """Flash attention adds sinks; torch operators compute soft-caps, and windows over shared prefixes."""
    torch.manual_seed(0)
    shapes = [(heads, packing.size, 8) for heads in (4, 2, 2)]
    inputs = [*(torch.randn(shape).bfloat16().double() for shape in shapes), torch.randn(4).bfloat16().double()]
    grad = torch.randn(packing.size, 4, 8).bfloat16().double()
    query, key, value, sinks = exact = [tensor.clone().requires_grad_() for tensor in inputs]
    options: Any = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": sinks}
    out = dense_attention(query, key, value, packing.lengths, packing.prefix_of, **options)
    expected = [out.detach(), *torch.autograd.grad(out, exact, grad)]
    with emulated_cuda() as device:
        leaves = [tensor.bfloat16().to(DEVICE).requires_grad_() for tensor in inputs]
        query, key, value, sinks = leaves
        arguments: Any = {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "s_aux": sinks}
        heads = (query[None], key[None], value[None])
        out, _ = packed_attention(LAYER, *heads, **arguments, **packed_kwargs(packing, DEVICE))
        gradients = torch.autograd.grad(out[0], leaves, grad.bfloat16().to(DEVICE))
        actual = [out[0].detach().cpu(), *(gradient.cpu() for gradient in gradients)]
        is_flash = softcap is None and (window is None or packing.prefix_of is None)
        assert bool(device.launches["_flash_attention_forward"]) == is_flash
        assert all("a test" in place for place in device.waits), device.waits
    for got, want in zip(actual, expected, strict=True):
        # Sinks add two roundings, of the output that they scale and of the outputs that their gradient sums.
        atol = TOLERANCE * 5 / 3 * float(want.abs().max())
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


def test_groups_of_a_packing() -> None:
    call = prefix_attention(PACKINGS["shared"], torch.device("cpu"))
    assert call is not None
    assert call.children.tolist() == [4, 5, 6, 7, 8, 9, 10, 21]
    assert call.prefixes.tolist() == [0, 1, 2, 3, 15, 16, 17, 18, 19, 20]
    assert (call.bounds.queries.tolist(), call.bounds.keys.tolist()) == ([0, 7, 8], [0, 4, 10])
    assert call.bounds[2:] == (7, 6)
    assert prefix_attention(PACKINGS["segments"], torch.device("cpu")) is None
