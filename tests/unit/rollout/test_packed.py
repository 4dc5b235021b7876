"""Copies of weights in another order: the same products, never stale, gone when the call is over."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cpu import linears as packed
from camshaft.rollout.builtin.cpu.linears import (
    FEW,
    FEW_LONG,
    FROM_ROWS,
    LONG,
    MANY,
    ROWS_PACKED,
    SMALL,
    SPLIT,
    STEPS,
    TINY,
    WIDE,
    Blocked,
    Packed,
    Split,
    Turned,
    packed_linears,
    product_of,
)
from camshaft.rollout.builtin.rollout import TorchRollout

SHAPE = (160, 96)
needs_onednn = pytest.mark.skipif(not packed._works(Blocked, *SHAPE), reason="this torch has no oneDNN here")
needs_mkl = pytest.mark.skipif(not packed._works(Packed, *SHAPE), reason="this torch has no MKL here")


def model(*sizes: tuple[int, int], bias: bool = True) -> nn.Sequential:
    """Linear layers of these (in, out) sizes."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(size[0], size[1], bias) for size in sizes)).requires_grad_(False)


def kinds(layers: nn.Module) -> list[type[nn.Module]]:
    return [type(layer) for layer in layers.children()]


def assert_product(product: torch.Tensor, rows: torch.Tensor, layer: nn.Linear) -> None:
    """The bound holds for any order of summation: n rounded products and sums lose at most n eps sum |x w|."""
    x, weight = rows.double(), layer.weight.double()
    bias = torch.zeros(len(weight)).double() if layer.bias is None else layer.bias.double()
    bound = (weight.shape[1] + 1) * torch.finfo(torch.float32).eps * F.linear(x.abs(), weight.abs(), bias.abs())
    assert ((product.double() - F.linear(x, weight, bias)).abs() <= bound).all()


@pytest.fixture(params=[True, False], ids=["mkl-fast", "mkl-slow"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A machine on which MKL is fast, and one on which it is not."""
    monkeypatch.setattr(packed, "_mkl_is_fast", lambda: request.param)
    return request.param


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "kind", [Turned, Split, pytest.param(Packed, marks=needs_mkl), pytest.param(Blocked, marks=needs_onednn)]
)
@pytest.mark.parametrize(
    "shape", [(1,), (FEW - 1,), (FEW,), (MANY - 1,), (33,), (1, 70), (ROWS_PACKED + 1,), (9, 1), (2, 3), (0,), (0, 1)]
)
def test_products_are_those_of_a_plain_layer(
    kind: Any, bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    plain = nn.Linear(96, 160, bias).requires_grad_(False)
    wanted = nn.Linear(96, 160, bias).requires_grad_(False)
    wanted.load_state_dict(plain.state_dict())
    rows = torch.randn(*shape, 96)
    plain.__class__ = kind
    plain.copied = kind.copy(plain.weight)
    found = plain(rows)
    for least in FROM_ROWS:  # through the products that a flat list calls
        if len(rows.flatten()) >= least * 96:
            assert_product(product_of(plain, least)(rows), rows, wanted)
    assert found.shape == (*shape, 160)
    assert_product(found, rows, wanted)


@needs_onednn
@needs_mkl
def test_the_size_of_a_weight_decides(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    side = int(SMALL**0.5)
    layers = model((side, side - 1), (side, side), (64, 64))
    assert (64 * 64, side * side) == (TINY, SMALL)
    with packed_linears(layers, FEW, STEPS):
        assert kinds(layers) == ([Turned, Packed, Turned] if fast else [Blocked, Blocked, nn.Linear])


@needs_mkl
def test_on_several_threads_weights_with_few_outputs_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_mkl_is_fast", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    side = 2 ** (SPLIT.bit_length() // 2)
    layers = model((WIDE, WIDE - 2), (WIDE, WIDE), (SPLIT // side, side), (SPLIT // side - 1, side), (WIDE, WIDE - 1))
    with packed_linears(layers, FEW, STEPS):
        assert kinds(layers) == [Split, Packed, Split, Turned, Turned]


@pytest.mark.parametrize(("inputs", "few", "many"), [(LONG - 1, FEW, MANY), (LONG, FEW_LONG, FEW_LONG)])
def test_the_number_of_rows_decides_how_a_split_layer_multiplies(
    inputs: int, few: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layer: Any = nn.Linear(inputs, 4, bias=False).requires_grad_(False)
    layer.copied = Split.copy(layer.weight)
    layer.__class__ = Split
    plain, (turned, split) = layer.weight.clone(), layer.copied
    split += 1  # to be told apart
    if turned is not None:
        turned += 2
    for rows in {FEW, few - 1, few, many - 1, many}:
        x = torch.ones(rows, 1, inputs)
        used = plain if rows < few else plain + 2 if rows < many else plain + 1
        least = max(least for least in FROM_ROWS if least <= rows)
        for product in (layer, product_of(layer, least)):
            torch.testing.assert_close(product(x), F.linear(x, used))


def test_without_operators_of_their_own_layers_are_turned_or_plain(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_works", lambda *of: False)
    layers = model((16, 16), (600, 600))
    with packed_linears(layers, FEW, STEPS):
        assert kinds(layers) == [Turned if fast else nn.Linear] * 2


def test_a_missing_or_wrong_operator_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn.no_such_operator(weight)

    for kind in (Packed, Blocked):
        own = kind.copy
        for copy in (missing, lambda weight, own=own: own(weight + 1)):
            monkeypatch.setattr(kind, "copy", staticmethod(copy))
            assert not packed._works.__wrapped__(kind, *SHAPE)


@pytest.mark.parametrize(("rows", "steps"), [(FEW - 1, STEPS), (FEW, STEPS - 1)])
def test_a_few_rows_or_steps_are_left_to_plain_layers(rows: int, steps: int, fast: bool) -> None:
    layers = model((96, 96))
    with packed_linears(layers, rows, steps):
        assert kinds(layers) == [nn.Linear]


class Other(nn.Linear):
    """A layer of somebody's own."""


def test_what_is_not_a_plain_float32_layer_is_left_alone(fast: bool) -> None:
    layers = nn.Sequential(Other(96, 96), nn.Linear(96, 96).bfloat16(), nn.Linear(96, 96).double(), nn.ReLU())
    hooked = nn.Linear(96, 96)
    hooked.register_forward_hook(lambda module, args, output: None)
    layers.append(hooked).append(nn.Linear(96, 96, device="meta"))
    before = kinds(layers)
    with packed_linears(layers, FEW, STEPS):
        assert kinds(layers) == before


def test_nothing_is_left_of_it(fast: bool) -> None:
    layers = model((96, 96), (600, 600))
    held = [dict(vars(layer)) for layer in layers]
    for _ in range(2):
        with packed_linears(layers, FEW, STEPS):
            assert kinds(layers) != [nn.Linear] * 2
            assert list(layers.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert kinds(layers) == [nn.Linear] * 2
        assert [vars(layer).keys() for layer in layers] == [was.keys() for was in held]


def test_nothing_is_left_of_it_after_an_error(fast: bool) -> None:
    layers = model((96, 96), (600, 600))
    with pytest.raises(RuntimeError, match="shape"), packed_linears(layers, FEW, STEPS):
        layers(torch.zeros(FEW, 5))
    assert kinds(layers) == [nn.Linear] * 2


def test_an_error_while_copying_leaves_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_mkl_is_fast", lambda: True)
    copied: list[torch.Tensor] = []

    def copy(weight: torch.Tensor) -> torch.Tensor:
        copied.append(weight)
        if len(copied) == 2:
            raise MemoryError
        return weight

    monkeypatch.setattr(Turned, "copy", staticmethod(copy))
    layers = model((16, 16), (16, 16))
    with pytest.raises(MemoryError), packed_linears(layers, FEW, STEPS):
        pass
    assert kinds(layers) == [nn.Linear] * 2


# -- in the generator -----------------------------------------------------------------------------

LAYERS = {"hidden": 128, "intermediate": 320, "tie_embeddings": False, "attention_bias": True}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_generation_uses_the_weights_of_the_moment(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(packed, "SMALL", 128 * 128)  # so that both kinds take part where MKL is fast
    more = {"num_local_experts": 2} if family == "mixtral" else {}
    case, sampling = RolloutHarness(TorchRollout, tmp_path).case(family, LAYERS | more), SamplingParams(STEPS)
    prompts = Ragged.from_rows([torch.arange(3, 3 + length) for length in (1, 7, 7, 30, 2, 2)])
    found = []
    for _ in range(3):
        out = case.rollout.generate_sequences(prompts, sampling, torch.arange(6))
        case.check_log_probs(prompts, out, sampling)
        found.append(out.log_probs.values)
        with torch.no_grad():
            for weight in case.plain.parameters():
                weight.data.mul_(0.9)  # leaves no trace in the version counter
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(found))
    rollout: Any = case.rollout
    assert not any(isinstance(module, Turned | Blocked) for module in rollout.model.hf.modules())
