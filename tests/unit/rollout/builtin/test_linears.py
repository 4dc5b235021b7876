"""Packed copies of weights give the same products, are never stale, and are freed after a generation."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cpu import linears
from camshaft.rollout.builtin.cpu.linears import (
    MANY_INPUTS,
    MAX_PLAIN_SIZE,
    MIN_MKL_OUTPUTS,
    MIN_MKL_SIZE,
    MIN_ROWS,
    MIN_ROWS_MANY_INPUTS,
    MIN_ROWS_SPLIT,
    MIN_SPLIT_SIZE,
    MIN_STEPS,
    MKL_ROWS,
    ROW_THRESHOLDS,
    MKLPacked,
    OneDNNPacked,
    PackableLinear,
    SplitByThread,
    Transposed,
    packed_linears,
    select_product,
    use_packable_linears,
)
from camshaft.rollout.builtin.rollout import TorchRollout

SHAPE = (160, 96)
needs_onednn = pytest.mark.skipif(
    not linears.is_layout_valid(OneDNNPacked, *SHAPE), reason="requires torch with oneDNN"
)
needs_mkl = pytest.mark.skipif(not linears.is_layout_valid(MKLPacked, *SHAPE), reason="requires torch with MKL")
EPS = torch.finfo(torch.float32).eps


def model(*sizes: tuple[int, int], bias: bool = True) -> nn.Sequential:
    """Build packable linear layers of these (inputs, outputs) sizes."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(size[0], size[1], bias) for size in sizes)).requires_grad_(False)
    use_packable_linears(layers)
    return layers


def layouts(layers: nn.Module) -> list[type | None]:
    packed = [getattr(layer, "packed", None) for layer in layers.children()]
    return [None if weight is None else type(weight) for weight in packed]


def assert_product(product: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The bound holds for any order of summation: n rounded products and sums lose at most n eps sum |x w|."""
    x, w, b = rows.double(), weight.double(), None if bias is None else bias.double()
    bound = (weight.shape[1] + 1) * EPS * F.linear(x.abs(), w.abs(), None if b is None else b.abs())
    assert ((product.double() - F.linear(x, w, b)).abs() <= bound).all()


@pytest.fixture(params=[True, False], ids=["mkl-fast", "mkl-slow"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Simulate a machine on which MKL is fast, and one on which it is slow."""
    monkeypatch.setattr(linears, "_mkl_is_fast", lambda: request.param)
    return request.param


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "layout",
    [
        Transposed,
        SplitByThread,
        pytest.param(MKLPacked, marks=needs_mkl),
        pytest.param(OneDNNPacked, marks=needs_onednn),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        (1,), (MIN_ROWS - 1,), (MIN_ROWS,), (MIN_ROWS_SPLIT - 1,), (33,), (1, 70), (MKL_ROWS + 1,), (9, 1), (2, 3),
        (0,), (0, 1),
    ],
)  # fmt: skip
def test_packed_products_equal_those_of_linear_layers(
    layout: Any, bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    layer = PackableLinear(96, 160, bias).requires_grad_(False)
    rows = torch.randn(*shape, 96)
    layer.packed = layout(layer.weight, layer.bias)
    product = layer(rows)
    for least in ROW_THRESHOLDS:  # the products that a traced forward calls
        if len(rows.flatten()) >= least * 96:
            assert_product(select_product(layer, least)(rows), rows, layer.weight, layer.bias)
    assert product.shape == (*shape, 160)
    assert_product(product, rows, layer.weight, layer.bias)


@needs_onednn
@needs_mkl
def test_weight_size_decides_the_layout(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    side = int(MIN_MKL_SIZE**0.5)
    layers = model((side, side - 1), (side, side), (64, 64))
    assert (64 * 64, side * side) == (MAX_PLAIN_SIZE, MIN_MKL_SIZE)
    with packed_linears(layers, MIN_ROWS, MIN_STEPS):
        expected = [Transposed, MKLPacked, Transposed] if fast else [OneDNNPacked, OneDNNPacked, None]
        assert layouts(layers) == expected


@needs_mkl
def test_few_outputs_are_split_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_mkl_is_fast", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    side, wide = 2 ** (MIN_SPLIT_SIZE.bit_length() // 2), MIN_MKL_OUTPUTS
    layers = model(
        (wide, wide - 2), (wide, wide), (MIN_SPLIT_SIZE // side, side), (MIN_SPLIT_SIZE // side - 1, side),
        (wide, wide - 1),
    )  # fmt: skip
    with packed_linears(layers, MIN_ROWS, MIN_STEPS):
        assert layouts(layers) == [SplitByThread, MKLPacked, SplitByThread, Transposed, Transposed]


@pytest.mark.parametrize(
    ("inputs", "few", "many"),
    [
        (MANY_INPUTS - 1, MIN_ROWS, MIN_ROWS_SPLIT),
        (MANY_INPUTS, MIN_ROWS_MANY_INPUTS, MIN_ROWS_MANY_INPUTS),
    ],
)
def test_number_of_rows_decides_the_product_of_a_split_layer(
    inputs: int, few: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layer = PackableLinear(inputs, 4, bias=False).requires_grad_(False)
    layer.packed = packed = SplitByThread(layer.weight, None)
    original = layer.weight.clone()
    packed.split += 1  # to distinguish the copies
    if packed.transposed is not None:
        packed.transposed += 2
    for rows in {MIN_ROWS, few - 1, few, many - 1, many}:
        x = torch.ones(rows, 1, inputs)
        weight = original if rows < few else original + 2 if rows < many else original + 1
        least = max(least for least in ROW_THRESHOLDS if least <= rows)
        for product in (layer, select_product(layer, least)):
            assert_product(product(x), x, weight, None)


def test_without_private_operators_layers_are_only_transposed(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "is_layout_valid", lambda *of: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    layers = model((16, 16), (600, 600))
    with packed_linears(layers, MIN_ROWS, MIN_STEPS):
        assert layouts(layers) == [Transposed if fast else None] * 2


def test_a_missing_or_wrong_operator_is_detected() -> None:
    class Missing(OneDNNPacked):
        def __init__(self, weight: Tensor, bias: Tensor | None):
            self.packed = torch.ops.mkldnn.no_such_operator(weight)

    class Wrong(Transposed):
        def __init__(self, weight: Tensor, bias: Tensor | None):
            super().__init__(weight + 1, bias)

    for layout in (Missing, Wrong):
        assert not linears.is_layout_valid.__wrapped__(layout, *SHAPE)


@pytest.mark.parametrize(("rows", "steps"), [(MIN_ROWS - 1, MIN_STEPS), (MIN_ROWS, MIN_STEPS - 1)])
def test_few_rows_or_steps_pack_nothing(rows: int, steps: int, fast: bool) -> None:
    layers = model((96, 96))
    with packed_linears(layers, rows, steps):
        assert layouts(layers) == [None]


class CustomLinear(nn.Linear):
    """A subclass, whose forward may differ."""


def test_only_float32_linear_layers_are_packed(fast: bool) -> None:
    layers = nn.Sequential(CustomLinear(96, 96), nn.Linear(96, 96).bfloat16(), nn.Linear(96, 96).double(), nn.ReLU())
    hooked = nn.Linear(96, 96)
    layers.append(hooked).append(nn.Linear(96, 96, device="meta"))
    use_packable_linears(layers)
    layers[4].register_forward_hook(lambda module, args, output: None)
    with packed_linears(layers, MIN_ROWS, MIN_STEPS):
        assert layouts(layers) == [None] * 6
    assert type(layers[0]) is CustomLinear


def test_packable_layers_share_parameters_with_the_layers_they_replace() -> None:
    layers = nn.ModuleDict({"one": nn.Linear(4, 3), "inner": nn.Sequential(nn.Linear(3, 2, bias=False))})
    layers["again"] = layers["one"]
    parameters = dict(layers.named_parameters(remove_duplicate=False))
    use_packable_linears(layers.eval())
    assert layers["again"] is layers["one"]
    assert not layers["one"].training
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        assert parameter is parameters.pop(name)
    assert not parameters


def test_nothing_stays_packed(fast: bool) -> None:
    layers = model((96, 96), (600, 600))
    for _ in range(2):
        with packed_linears(layers, MIN_ROWS, MIN_STEPS):
            assert None not in layouts(layers)
            assert list(layers.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert layouts(layers) == [None, None]


def test_nothing_stays_packed_after_an_error(fast: bool) -> None:
    layers = model((96, 96), (600, 600))
    with pytest.raises(RuntimeError, match="shape"), packed_linears(layers, MIN_ROWS, MIN_STEPS):
        layers(torch.zeros(MIN_ROWS, 5))
    assert layouts(layers) == [None, None]


def test_an_error_while_packing_leaves_layers_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_mkl_is_fast", lambda: True)
    packed: list[Tensor] = []

    class Fails(Transposed):
        def __init__(self, weight: Tensor, bias: Tensor | None):
            packed.append(weight)
            if len(packed) == 2:
                raise MemoryError
            super().__init__(weight, bias)

    monkeypatch.setattr(linears, "Transposed", Fails)
    layers = model((16, 16), (16, 16))
    with pytest.raises(MemoryError), packed_linears(layers, MIN_ROWS, MIN_STEPS):
        pass
    assert layouts(layers) == [None, None]


# -- in the generator -----------------------------------------------------------------------------

LAYERS = {"hidden": 128, "intermediate": 320, "tie_embeddings": False, "attention_bias": True}


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("gemma3_text", "mixtral"))]
)
def test_generation_packs_the_present_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(linears, "MIN_MKL_SIZE", 128 * 128)  # so that both layouts are used where MKL is fast
    more = {"num_local_experts": 2} if family == "mixtral" else {}
    case, sampling = RolloutHarness(TorchRollout, tmp_path).case(family, LAYERS | more), SamplingParams(MIN_STEPS)
    prompts = Ragged.from_rows([torch.arange(3, 3 + length) for length in (1, 7, 7, 30, 2, 2)])
    log_probs = []
    for _ in range(3):
        out = case.rollout.generate_sequences(prompts, sampling, torch.arange(6))
        case.check_log_probs(prompts, out, sampling)
        log_probs.append(out.log_probs.values)
        with torch.no_grad():
            for weight in case.oracle.parameters():
                weight.data.mul_(0.9)  # does not change the version counter
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(log_probs))
    rollout: Any = case.rollout
    packable = [layer for layer in rollout.model.hf.modules() if isinstance(layer, PackableLinear)]
    assert packable
    assert all(layer.packed is None for layer in packable)
