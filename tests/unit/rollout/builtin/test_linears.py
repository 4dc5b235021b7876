"""Packed copies of weights give the same products, are never stale, and are freed after a generation."""

import itertools
import weakref
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


class Conversation:
    """Rows that continue in turns, with weights that are updated in place."""

    def __init__(self, folder: Path):
        self.case = RolloutHarness(TorchRollout, folder).case("llama", LAYERS, max_model_len=192)
        self.sampling = SamplingParams(MIN_STEPS, ignore_eos=True)
        self.rows = Ragged.from_rows([torch.arange(3, 3 + length) for length in (1, 7, 7, 30, 2, 2)])
        rollout: Any = self.case.rollout
        self.rollout: TorchRollout = rollout

    def turn(self, ids: str = "abcdef") -> None:
        """Generate the next turn, and compare its log-probs with those of the current weights."""
        out = self.rollout.generate_sequences(self.rows, self.sampling, torch.arange(6), row_ids=ids)
        self.case.check_log_probs(self.rows, out, self.sampling)
        self.rows = Ragged.join(Ragged.join(self.rows, out.responses), Ragged.from_rows([[5, 6]] * 6))

    def update(self) -> None:
        with torch.no_grad():
            for weight in self.case.oracle.parameters():
                weight.data.mul_(0.9)

    def copies(self) -> dict[PackableLinear, Any]:
        return dict(self.rollout.decoder.copies)


@pytest.fixture
def talk(tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch) -> Conversation:
    monkeypatch.setattr(linears, "MIN_MKL_SIZE", 128 * 128)
    return Conversation(tmp_path)


def test_turns_share_the_packed_weights(talk: Conversation) -> None:
    talk.turn()
    first = talk.copies()
    assert first
    talk.turn()
    assert talk.copies() == first
    assert all(layer.packed is None for layer in first)


def test_a_weight_sync_replaces_the_packed_weights_of_a_conversation(talk: Conversation) -> None:
    for _ in range(2):
        talk.turn()
        before = talk.copies()
        talk.update()
        talk.rollout.load_weights(talk.case.weights())
        assert not talk.copies()
        talk.turn()
        assert all(before[layer] is not copy for layer, copy in talk.copies().items())


def test_other_parameters_are_packed_again_without_a_sync(talk: Conversation) -> None:
    talk.turn()
    before = talk.copies()
    with torch.no_grad():
        for layer in before:
            layer.weight = nn.Parameter(layer.weight * 0.9, requires_grad=False)
    with talk.rollout.decoder.prepare(MIN_ROWS, MIN_STEPS, keep=True):
        for layer in before:
            rows = torch.randn(MIN_ROWS, layer.in_features)
            assert_product(layer(rows), rows, layer.weight, layer.bias)


def test_calls_between_turns_use_the_present_weights(talk: Conversation) -> None:
    talk.turn()
    before, prompts = talk.copies(), Ragged.from_rows([[7]] * 6)
    talk.update()
    out = talk.rollout.generate_sequences(prompts, talk.sampling, torch.arange(6))
    talk.case.check_log_probs(prompts, out, talk.sampling)
    assert talk.copies() == before


@pytest.mark.parametrize("end", ["sleep", "close"])
def test_packed_weights_are_freed_with_the_rows(talk: Conversation, end: str) -> None:
    talk.turn()
    packed = [weakref.ref(copy) for copy in talk.copies().values()]
    assert packed
    talk.rollout.close_rows("abc")
    assert talk.copies()
    talk.rollout.close_rows("def") if end == "close" else talk.rollout.sleep()
    assert not any(copy() for copy in packed)


def test_rows_that_are_closed_while_others_run_do_not_free_weights(talk: Conversation) -> None:
    with talk.rollout.open_stream() as stream:
        for row_id, row in enumerate(talk.rows.rows()):
            stream.put(row_id, row.tolist(), talk.sampling, seed=row_id)
        ended: set[Any] = set()
        while len(ended) < 6:
            ended |= {answer.row_id for answer in stream.take(10.0)}
        first = talk.copies()
        assert first
        for row_id in range(6):
            stream.close(row_id)
        stream.put("next", [5, 6], talk.sampling, seed=1)
        while not stream.take(10.0):
            pass
        assert talk.copies() == first
    stream.close("next")


def test_a_failed_call_frees_the_packed_weights(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    talk.turn()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(talk.rollout.cache, "check_layers", fail)
    with pytest.raises(MemoryError):
        talk.turn()
    assert not talk.copies()
